"""Patches arrive with their modules, say what became of them, and go without a trace."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import pickle
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import wrapt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtllm_r3.trtllm.patching import Patch, Patcher, State, Target, active_patchers

ENGINE = """
from dataclasses import dataclass

class Base:
    def run(self): return "run"
    @staticmethod
    def fixed(x): return x
    @classmethod
    def made(cls, x): return (cls.__name__, x)

class Loop(Base):
    size = 3
    def step(self, n, *, fast=False): return f"step{n}"
    async def wait(self): return "waited"

@dataclass(slots=True)
class Params:
    n: int = 1

def work(x): return f"work{x}"
"""
_count = itertools.count()


class Engine:
    """A package of a name that no test had before: hooks on names outlive a test."""

    def __init__(self, folder):
        self.name = f"fake_engine_{next(_count)}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.add("__init__", "")
        self.add("core", ENGINE)
        self.add("user", f"from {self.name}.core import work, Loop\ndef call(): return work(1)")

    def add(self, module, text):
        (self.folder / f"{module}.py").write_text(text)

    def load(self, module="core"):
        return importlib.import_module(f"{self.name}.{module}")

    def target(self, attribute, wrapper="star", modules=("core",), **more):
        names = tuple(f"{self.name}.{m}" for m in modules)
        return Target(
            attribute=attribute, modules=names, wrapper=f"fake_wrappers:{wrapper}", why="test", **more
        )


def star(wrapped, instance, args, kwargs):
    return f"*{wrapped(*args, **kwargs)}"


def starred(original):
    @functools.wraps(original)
    def inner(*args, **kwargs):
        return f"*{original(*args, **kwargs)}"

    return inner


def params_init(original):
    @functools.wraps(original)
    def inner(self, *args, extra=None, **kwargs):
        original(self, *args, **kwargs)

    return inner


def add_flag(owner):
    owner.flag = property(lambda self: True)

    def undo():
        del owner.flag

    return undo


def edit_of_a_missing_thing(owner):
    return owner.no_such_thing


def forgetful_edit(owner):
    owner.flag = True


def undo_that_fails(owner):
    def undo():
        raise OSError("stuck")

    return undo


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "fake_wrappers", sys.modules[__name__])
    engine = Engine(tmp_path)
    yield engine
    for patcher in active_patchers():
        patcher.revert()
    for name in [n for n in sys.modules if n.partition(".")[0] == engine.name]:
        del sys.modules[name]


def states(patcher):
    return [p.state for p in patcher.patches]


# ---- arriving ----


def test_a_patch_waits_for_its_module_and_is_applied_when_it_comes(engine):
    with Patcher([engine.target("Loop.step")]) as patcher:
        assert states(patcher) == [State.WAITING]
        assert engine.load().Loop().step(1) == "*step1"
        assert states(patcher) == [State.APPLIED]
        assert patcher.patches[0].module == f"{engine.name}.core"


def test_a_module_that_is_imported_already_is_patched_at_once(engine):
    core = engine.load()
    with Patcher([engine.target("Loop.step")]) as patcher:
        assert states(patcher) == [State.APPLIED]
        assert core.Loop().step(1) == "*step1"


@pytest.mark.parametrize("kind", ["function", "plain"])
def test_static_and_class_methods_keep_their_binding(engine, kind):
    wrapper = {"function": "star", "plain": "starred"}[kind]
    rows = [engine.target(f"Base.{name}", wrapper, kind=kind) for name in ("fixed", "made")]
    core = engine.load()
    with Patcher(rows):
        assert core.Base.fixed(1) == core.Base().fixed(1) == "*1"
        assert core.Loop.made(2) == core.Loop().made(2) == "*('Loop', 2)"
    assert core.Loop.made(2) == ("Loop", 2)
    assert isinstance(vars(core.Base)["fixed"], staticmethod)


def test_an_inherited_method_is_patched_on_the_class_that_was_named(engine):
    core = engine.load()
    with Patcher([engine.target("Loop.run")]):
        assert (core.Loop().run(), core.Base().run()) == ("*run", "run")
    assert "run" not in vars(core.Loop)


def test_the_signature_stays_visible(engine):
    core = engine.load()
    with Patcher([engine.target("Loop.step"), engine.target("Params.__init__", "params_init", kind="plain")]):
        assert list(inspect.signature(core.Loop.step).parameters) == ["self", "n", "fast"]
        assert list(inspect.signature(core.Params).parameters) == ["n"]


# ---- plain functions and edits ----


def test_a_plain_function_is_pickled_by_reference(engine):
    core = engine.load()
    with Patcher([engine.target("work", "starred", kind="plain")]):
        assert inspect.isfunction(core.work)
        assert pickle.loads(pickle.dumps(core.work)) is core.work


def test_the_init_of_a_slots_dataclass_takes_a_plain_function(engine):
    core = engine.load()
    with Patcher([engine.target("Params.__init__", "params_init", kind="plain")]):
        assert pickle.loads(pickle.dumps(core.Params(n=2, extra=1))) == core.Params(2)
    with pytest.raises(TypeError, match="extra"):
        core.Params(n=2, extra=1)


def test_a_coroutine_is_no_plain_function(engine):
    engine.load()
    with Patcher([engine.target("Loop.wait", "starred", kind="plain")]) as patcher:
        assert states(patcher) == [State.FAILED]
        assert "expected a plain function" in patcher.patches[0].reason


def test_an_edit_is_made_once_and_undone(engine):
    core = engine.load()
    patcher = Patcher([engine.target("Params", "add_flag", kind="edit")])
    patcher.apply()
    patcher.apply()
    assert core.Params().flag
    patcher.revert()
    assert not hasattr(core.Params(), "flag")


def test_an_edit_may_take_the_module_itself(engine):
    core = engine.load()
    with Patcher([engine.target("", "add_flag", kind="edit")]):
        assert isinstance(core.flag, property)
    assert not hasattr(core, "flag")


def test_an_edit_without_an_undo_has_failed(engine):
    engine.load()
    with Patcher([engine.target("Params", "forgetful_edit", kind="edit")]) as patcher:
        assert states(patcher) == [State.FAILED]
        assert "expected an undo callable from fake_wrappers:forgetful_edit" in patcher.patches[0].reason


def test_an_attribute_error_of_our_own_is_a_failure_and_no_absence(engine):
    engine.load()
    with Patcher([engine.target("Params", "edit_of_a_missing_thing", kind="edit")]) as patcher:
        assert states(patcher) == [State.FAILED]


def test_an_undo_that_fails_is_recorded_and_the_others_go_on(engine):
    core = engine.load()
    patcher = Patcher([engine.target("Loop.step"), engine.target("Params", "undo_that_fails", kind="edit")])
    patcher.apply()
    patcher.revert()
    assert core.Loop().step(1) == "step1"
    assert states(patcher) == [State.WAITING, State.FAILED]
    assert "not undone: OSError('stuck')" in patcher.report()[1]["reason"]


# ---- captured names ----


@pytest.mark.parametrize(("kind", "wrapper"), [("function", "star"), ("plain", "starred")])
def test_names_captured_before_are_rebound_and_given_back(engine, kind, wrapper):
    user, core = engine.load("user"), engine.load()
    original = core.work
    with Patcher([engine.target("work", wrapper, kind=kind)]):
        assert user.call() == "*work1"
        assert user.work is core.work
    assert user.work is core.work is original


def test_names_captured_while_patched_are_given_back_too(engine):
    core = engine.load()
    original = core.work
    with Patcher([engine.target("work")]):
        user = engine.load("user")
        assert user.call() == "*work1"
    assert user.work is original


def test_names_in_other_packages_are_left_alone(engine, monkeypatch):
    core = engine.load()
    stranger = ModuleType(engine.name + "_stranger")
    stranger.work = core.work
    monkeypatch.setitem(sys.modules, stranger.__name__, stranger)
    with Patcher([engine.target("work")]):
        assert stranger.work(1) == "work1"


# ---- what can be wrong ----


def test_an_absent_attribute_is_reported_and_not_raised(engine):
    with Patcher([engine.target("Loop.nope"), engine.target("Nope.x", required=False)]) as patcher:
        engine.load()
        assert states(patcher) == [State.ABSENT, State.ABSENT]
        assert [p.target.attribute for p in patcher.missing()] == ["Loop.nope"]
        assert "nope" in patcher.patches[0].reason


@pytest.mark.parametrize("wrapper", ["fake_wrappers:nope", "no_such_module:f"])
def test_a_broken_wrapper_does_not_break_the_import(engine, wrapper):
    row = Target(attribute="Loop.step", modules=(f"{engine.name}.core",), wrapper=wrapper, why="test")
    with Patcher([row]) as patcher:
        assert engine.load().Loop().step(1) == "step1"
        assert states(patcher) == [State.FAILED]
        assert patcher.missing() == patcher.patches


def test_a_parameter_that_is_gone_fails_with_both_sides(engine):
    core = engine.load()
    with Patcher(
        [engine.target("Loop.step", needs=("n", "speed")), engine.target("work", needs=("x",))]
    ) as p:
        assert states(p) == [State.FAILED, State.APPLIED]
        assert p.patches[0].reason == (
            f"{engine.name}.core: TypeError: expected parameters n, speed; "
            "found (self, n, *, fast=False): no speed"
        )
        assert core.Loop().step(1) == "step1"


@pytest.mark.parametrize("attribute", ["Loop.size", "Loop"])
def test_what_is_no_function_is_not_wrapped(engine, attribute):
    engine.load()
    with Patcher([engine.target(attribute)]) as patcher:
        assert states(patcher) == [State.FAILED]
        assert "expected a function" in patcher.patches[0].reason


def test_missing_leaves_out_what_still_waits_unless_asked(engine):
    with Patcher([engine.target("Loop.step")]) as patcher:
        assert patcher.missing() == []
        assert patcher.missing(include_waiting=True) == patcher.patches


def test_the_report_is_plain_text_in_the_order_of_the_table(engine):
    engine.load()
    with Patcher([engine.target("Loop.step"), engine.target("Loop.nope", required=False)]) as patcher:
        report = patcher.report()
    assert [(row["attribute"], row["state"], row["required"]) for row in report] == [
        ("Loop.step", "applied", "yes"),
        ("Loop.nope", "absent", "no"),
    ]
    assert all(isinstance(value, str) for row in report for value in row.values())


def test_an_import_that_fails_keeps_its_hook_for_the_next_try(engine):
    engine.add("late", "raise ImportError('not yet')")
    with Patcher([engine.target("work", modules=("late",))]) as patcher:
        with pytest.raises(ImportError, match="not yet"):
            engine.load("late")
        engine.add("late", "def work(x): return x  # found now")
        importlib.invalidate_caches()
        assert engine.load("late").work(1) == "*1"
        assert states(patcher) == [State.APPLIED]


def test_a_module_that_is_half_imported_is_looked_at_again(engine):
    """A module of the engine applies the patches while the engine's own module runs its body."""
    engine.add("half", "def work(x): ...\nimport fake_hook; fake_hook.run()\ndef work(x): return x")
    patcher = Patcher([engine.target("work", modules=("half",))])
    sys.modules["fake_hook"] = SimpleNamespace(run=patcher.apply)
    try:
        half = engine.load("half")
    finally:
        del sys.modules["fake_hook"]
    assert patcher.missing(include_waiting=True) == []
    assert half.work(1) == "*1"


# ---- several names of a module ----


@pytest.fixture
def moved(engine):
    """`work` lives in `new`; `old` has one of its own; `bare` has none."""
    engine.add("new", "def work(x): return f'new{x}'")
    engine.add("old", "def work(x): return f'old{x}'")
    engine.add("bare", "")
    return engine


@pytest.mark.parametrize("order", list(itertools.permutations(["apply", "new", "old"])))
def test_the_newest_name_wins_in_every_order_and_alone(moved, order):
    patcher = Patcher([moved.target("work", modules=("new", "old"))])
    for act in order:
        if act == "apply":
            patcher.apply()
        else:
            moved.load(act)
    assert moved.load("new").work(1) == "*new1"
    assert moved.load("old").work(1) == "old1"
    assert patcher.patches[0].module == f"{moved.name}.new"


@pytest.mark.parametrize("order", list(itertools.permutations(["apply", "bare", "old"])))
def test_a_name_that_has_the_attribute_beats_a_newer_one_without(moved, order):
    patcher = Patcher([moved.target("work", modules=("bare", "old"))])
    for act in order:
        if act == "apply":
            patcher.apply()
        else:
            moved.load(act)
    assert states(patcher) == [State.APPLIED]
    assert moved.load("old").work(1) == "*old1"
    assert patcher.missing() == []


@pytest.mark.parametrize("order", [["core", "new"], ["new", "core"]])
def test_one_object_under_two_names_is_wrapped_once(engine, order):
    engine.add("new", f"from {engine.name}.core import Loop, Params, work")
    with Patcher(
        [
            engine.target("Loop.step", modules=("new", "core")),
            engine.target("work", modules=("new", "core")),
            engine.target("Params", "add_flag", modules=("new", "core"), kind="edit"),
        ]
    ) as patcher:
        for name in order:
            engine.load(name)
        assert states(patcher) == [State.APPLIED] * 3
        assert engine.load("core").Loop().step(1) == "*step1"
        assert engine.load("core").Params().flag
        assert engine.load("core").work(1) == engine.load("new").work(1) == "*work1"
    assert not hasattr(engine.load("core").Params, "flag")
    assert engine.load("core").work is engine.load("new").work


def test_a_failure_under_one_name_outweighs_an_absence_under_another(moved):
    moved.load("bare")
    moved.load("old")
    with Patcher([moved.target("work", modules=("bare", "old"), needs=("y",))]) as patcher:
        assert states(patcher) == [State.FAILED]
        assert "bare: module" in patcher.patches[0].reason
        assert "old: TypeError: expected parameters y; found (x): no y" in patcher.patches[0].reason


# ---- going ----


def test_after_revert_each_object_is_the_very_one_it_was(engine):
    core = engine.load()
    before = {**vars(core.Loop), **vars(core)}
    rows = ["Loop.step", "Loop.run", "work"]
    with Patcher(
        [engine.target(row) for row in rows] + [engine.target("Params.__init__", "params_init", kind="plain")]
    ):
        pass
    assert all(before[k] is v for k, v in {**vars(core.Loop), **vars(core)}.items())
    assert before.keys() == {**vars(core.Loop), **vars(core)}.keys()


def test_a_hook_that_fires_after_revert_does_nothing(engine):
    patcher = Patcher([engine.target("Loop.step")])
    patcher.apply()
    patcher.revert()
    assert engine.load().Loop().step(1) == "step1"
    assert states(patcher) == [State.WAITING]


def test_asking_for_the_state_after_revert_patches_nothing(engine):
    core = engine.load()
    patcher = Patcher([engine.target("Loop.step"), engine.target("Loop.nope")])
    patcher.apply()
    patcher.revert()
    assert patcher.missing() == []
    assert [(row["state"], row["reason"]) for row in patcher.report()] == [("waiting", "")] * 2
    assert core.Loop().step(1) == "step1"


def test_a_module_that_is_imported_anew_is_patched_anew(engine):
    if tuple(map(int, wrapt.__version__.split(".")[:2])) < (1, 15):
        pytest.skip(f"wrapt {wrapt.__version__} holds on to names that were imported once")
    patcher = Patcher([engine.target("Loop.step")])
    for _ in range(2):
        with patcher:
            assert engine.load().Loop().step(1) == "*step1"
        del sys.modules[f"{engine.name}.core"]


def revert_in_between(owner):
    undo = add_flag(owner)
    for patcher in active_patchers():
        patcher.revert()
    return undo


def apply_in_between(owner):
    for patcher in active_patchers():
        patcher.apply()
    return add_flag(owner)


def test_what_is_ready_only_after_a_revert_is_taken_away_at_once(engine):
    core = engine.load()
    patcher = Patcher([engine.target("Params", "revert_in_between", kind="edit")])
    patcher.apply()
    assert not hasattr(core.Params, "flag")
    assert states(patcher) == [State.WAITING]


def test_a_wrapper_that_applies_again_is_not_entered_twice(engine):
    core = engine.load()
    with Patcher([engine.target("Params", "apply_in_between", kind="edit")]) as patcher:
        assert states(patcher) == [State.APPLIED]
        assert core.Params().flag


def test_apply_and_revert_may_alternate(engine):
    patcher = Patcher([engine.target("Loop.step")])
    for _ in range(3):
        patcher.apply()
        patcher.apply()
        patcher.revert()
    patcher.apply()
    assert engine.load().Loop().step(1) == "*step1"
    for _ in range(3):
        patcher.revert()
        patcher.revert()
        assert engine.load().Loop().step(1) == "step1"
        patcher.apply()
        assert engine.load().Loop().step(1) == "*step1"


def test_hooks_do_not_pile_up(engine):
    importer = pytest.importorskip("wrapt.importer")
    for _ in range(5):
        with Patcher([engine.target("Loop.step"), engine.target("work")]):
            pass
    assert len(importer._post_import_hooks[f"{engine.name}.core"]) == 1


def test_two_patchers_end_in_any_order(engine):
    core = engine.load()
    original = vars(core.Loop)["step"]
    for first, second in [(0, 1), (1, 0)]:
        both = [Patcher([engine.target("Loop.step")]), Patcher([engine.target("Loop.step")])]
        for patcher in both:
            patcher.apply()
        assert core.Loop().step(1) == "**step1"
        both[first].revert()
        assert core.Loop().step(1) == "*step1"
        both[second].revert()
        assert vars(core.Loop)["step"] is original


@pytest.mark.parametrize("first", [0, 1])
def test_two_patchers_of_an_inherited_method_leave_nothing_on_the_class(engine, first):
    core = engine.load()
    both = [Patcher([engine.target("Loop.run")]), Patcher([engine.target("Loop.run")])]
    for patcher in both:
        patcher.apply()
    both[first].revert()
    both[1 - first].revert()
    assert "run" not in vars(core.Loop)


@pytest.mark.parametrize(("kind", "wrapper"), [("function", "star"), ("plain", "starred")])
def test_under_a_strangers_wrapper_ours_stays_and_does_nothing(engine, kind, wrapper):
    core = engine.load()
    patcher = Patcher([engine.target("Loop.step", wrapper, kind=kind)])
    patcher.apply()
    ours = vars(core.Loop)["step"]

    @functools.wraps(ours)
    def stranger(self, *args, **kwargs):
        return f"stranger {ours.__get__(self)(*args, **kwargs)}"

    core.Loop.step = stranger
    assert core.Loop().step(1) == "stranger *step1"
    patcher.revert()
    assert core.Loop().step(1) == "stranger step1"
    patcher.apply()
    assert core.Loop().step(1) == "*stranger step1"
    patcher.revert()
    assert vars(core.Loop)["step"] is stranger


def test_a_stranger_that_goes_after_us_leaves_something_inert_that_is_not_wrapped_again(engine):
    core = engine.load()
    original = vars(core.Loop)["step"]
    patcher = Patcher([engine.target("Loop.step")])
    patcher.apply()
    ours = vars(core.Loop)["step"]
    core.Loop.step = lambda self, n: "stranger"
    patcher.revert()
    core.Loop.step = ours  # the stranger restores what it had found
    assert core.Loop().step(1) == "step1"
    with patcher:
        assert core.Loop().step(1) == "*step1"
    assert vars(core.Loop)["step"] is original


acts = st.lists(
    st.sampled_from(["apply0", "apply1", "revert0", "revert1", "import", "stranger"]), max_size=12
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=acts)
def test_after_any_history_only_the_active_patchers_act(engine, tmp_path, acts):
    fresh = Engine(tmp_path)
    both = [Patcher([fresh.target("Loop.step"), fresh.target("work", "starred", kind="plain")]) for _ in "01"]
    strangers = 0
    for act in acts:
        if act == "import":
            fresh.load()
        elif act == "stranger":
            cls, strangers = fresh.load().Loop, strangers + 1
            cls.step = (lambda below: lambda self, n: f"+{below.__get__(self)(n)}")(vars(cls)["step"])
        else:
            getattr(both[int(act[-1])], act[:-1])()
    active = sum(patcher in active_patchers() for patcher in both)
    core = fresh.load()
    assert sorted(core.Loop().step(1)) == sorted("*" * active + "+" * strangers + "step1")
    assert core.work(1) == "*" * active + "work1"
    for patcher in both:
        patcher.revert()
    assert core.Loop().step(1) == "+" * strangers + "step1"
    assert core.work.__dict__ == {}


# ---- threads and start-up ----


def test_applying_from_many_threads_wraps_once(engine):
    core = engine.load()
    patcher = Patcher([engine.target("Loop.step"), engine.target("work")])
    start = threading.Barrier(8)

    def run():
        start.wait()
        patcher.apply()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (core.Loop().step(1), core.work(1)) == ("*step1", "*work1")


def test_imports_and_switching_at_the_same_time_do_not_deadlock(engine):
    names = [f"m{i}" for i in range(30)]
    for name in names:
        engine.add(name, "import time; time.sleep(0.0005)\ndef work(x): return x")
    patcher = Patcher([engine.target("work", modules=(name,)) for name in names])

    def switch():
        for _ in range(20):
            patcher.apply()
            patcher.revert()

    threads = [threading.Thread(target=switch, daemon=True) for _ in range(2)]
    threads += [threading.Thread(target=engine.load, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    with patcher:
        assert [engine.load(name).work(1) for name in names] == ["*1"] * 30
    assert [engine.load(name).work(1) for name in names] == [1] * 30


def test_the_patcher_needs_neither_torch_nor_the_engine():
    code = (
        "import sys, trtllm_r3.trtllm.patching; "
        "print([m for m in ('torch', 'tensorrt_llm') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_patch_that_was_never_tried_has_no_reason(engine):
    assert Patch(engine.target("Loop.step")).reason == ""
