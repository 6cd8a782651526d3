"""Text: prompts through a tokenizer, incremental text, stop strings that only the text shows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import trtllm_r3.standin

trtllm_r3.standin.install()

from support import pool_tasks  # noqa: E402
from support.fake_engine import InProcess, InWorker  # noqa: E402
from tensorrt_llm import LLM, SamplingParams  # noqa: E402
from tensorrt_llm.llmapi.mpi_session import MpiPoolSession  # noqa: E402
from tensorrt_llm.llmapi.tokenizer import TokenizerBase, TransformersTokenizer, load_hf_tokenizer  # noqa: E402


class Letters(TokenizerBase):
    """Token i is the i-th letter; 26 and 27 together are one character of two bytes."""

    eos_token_id = 999

    def encode(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        return [ord(c) - ord("a") for c in text]

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        data = bytes({26: 0xC3, 27: 0xA9}.get(t, ord("a") + t % 26) for t in token_ids)
        return data.decode("utf-8", errors="replace")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def llm(model_dir: Path) -> Any:
    with LLM(model=model_dir, tokenizer=Letters(), executor_cls=InProcess) as llm:
        yield llm


def test_text_goes_in_and_comes_out(llm):
    output = llm.generate("ab", SamplingParams(max_tokens=3), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids, output.outputs[0].text) == ("ab", [0, 1], "bcd")


def test_the_end_token_and_the_stop_words_are_written_into_the_users_own_parameters(llm):
    params = SamplingParams(stop=["de"], max_tokens=9)
    output = llm.generate("ab", params, use_tqdm=False).outputs[0]
    assert (params.end_id, params.pad_id, params._stop_word_ids, params._stream_interval) == (
        999,
        999,
        [[3, 4]],
        1,
    )
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (
        "bc",
        [1, 2],
        "stop",
        "de",
    )


def test_a_stop_string_stays_if_the_user_wants_it(llm):
    params = SamplingParams(stop="de", max_tokens=9, include_stop_str_in_output=True)
    output = llm.generate("ab", params, use_tqdm=False).outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == ("bcde", [1, 2, 3, 4], "de")


def test_stop_strings_work_with_an_end_id_of_the_users_own(llm):
    params = SamplingParams(stop="de", max_tokens=9, end_id=777)
    assert llm.generate("ab", params, use_tqdm=False).outputs[0].text == "bc"


def test_streamed_text_grows_and_never_shows_half_a_character(llm):
    texts = [
        o.outputs[0].text for o in llm.generate_async([25], SamplingParams(max_tokens=4), streaming=True)
    ]
    assert texts == ["z", "z", "z\u00e9", "z\u00e9c"]


def test_streamed_texts_of_several_sequences_keep_apart(llm):
    params = SamplingParams(max_tokens=3, n=2, temperature=1.0)
    future = llm.generate_async([0], params, streaming=True).result()
    assert [o.text for o in future.outputs] == ["abc", "wxy"]


def test_unfinished_characters_come_out_at_the_end(llm):
    outputs = list(llm.generate_async([25], SamplingParams(max_tokens=2), streaming=True))
    assert outputs[-1].outputs[0].text == "z\ufffd"


def test_a_stop_string_seen_only_in_the_text_aborts_the_request(llm):
    class Words(Letters):
        def encode(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
            return [500]  # the engine never generates these tokens

    llm.tokenizer = Words()
    future = llm.generate_async([0], SamplingParams(stop="cd", max_tokens=20), streaming=True).result()
    assert (future.outputs[0].text, future.outputs[0].finish_reason) == ("ab", "stop")
    assert (future.outputs[0].stop_reason, future.aborted()) == ("cd", True)


def test_without_detokenize_there_is_no_text(llm):
    assert (
        llm.generate("ab", SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False).outputs[0].text
        == ""
    )


def test_a_long_prompt_keeps_its_last_tokens_when_asked(llm):
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=2)
    assert llm.generate("abcd", params, use_tqdm=False).prompt_token_ids == [2, 3]


def test_a_directory_without_tokenizer_files_has_no_tokenizer(model_dir):
    assert load_hf_tokenizer(model_dir) is None


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(["to be or not to be, caf\u00e9"] * 9, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_a_tokenizer_of_transformers_is_loaded_from_the_model_or_a_path_or_taken_as_it_is(model_dir, trained):
    import transformers

    for name in trained.iterdir():
        (model_dir / name.name).write_bytes(name.read_bytes())
    ids = []
    for given in (None, str(trained), trained, transformers.AutoTokenizer.from_pretrained(trained)):
        with LLM(model=model_dir, tokenizer=given, executor_cls=InProcess) as llm:
            output = llm.generate("to be", SamplingParams(max_tokens=1), use_tqdm=False)
            ids.append(output.prompt_token_ids)
            assert output.sampling_params.end_id == 0
    assert ids == [ids[0]] * 4


def test_text_in_pieces_is_the_text_of_all_tokens(trained):
    tokenizer = TransformersTokenizer.from_pretrained(trained)
    token_ids = [*tokenizer.encode("not to caf\u00e9, \u4f60\u597d or be"), 0]
    text, states = "", None
    for i, token in enumerate(token_ids):
        text, states = tokenizer.decode_incrementally(
            [token], text, states, flush=i == len(token_ids) - 1, skip_special_tokens=True
        )
        assert "\ufffd" not in text
    assert (
        text
        == tokenizer.decode(token_ids, skip_special_tokens=True)
        == "not to caf\u00e9, \u4f60\u597d or be"
    )


def test_a_worker_receives_the_tokenizer_without_importing_transformers(model_dir, trained):
    tokenizer = TransformersTokenizer.from_pretrained(trained)
    travelled = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(tokenizer))))
    assert travelled.encode("to be") == tokenizer.encode("to be")
    with LLM(model=model_dir, tokenizer=tokenizer, executor_cls=InWorker) as llm:
        assert llm.generate("to be", SamplingParams(max_tokens=1), use_tqdm=False).outputs[0].token_ids
    session = MpiPoolSession(n_workers=1)
    assert session.submit_sync(pool_tasks.imported_with, tokenizer, "transformers") == [False]
    session.shutdown()
