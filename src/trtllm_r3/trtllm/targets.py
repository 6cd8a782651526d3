"""The whole list of what we touch in TensorRT-LLM. Data only; the wrappers are imported when needed.

Classes are patched, never their instances' types: SamplingParams and CompletionOutput are pickled by name.
"""

from __future__ import annotations

from .patching import Target

_HERE = "trtllm_r3.trtllm"
_PYEXECUTOR = "tensorrt_llm._torch.pyexecutor"

TARGETS: tuple[Target, ...] = (
    Target(
        attribute="SamplingParams.__init__",
        modules=("tensorrt_llm.sampling_params",),
        wrapper=f"{_HERE}.requests:sampling_params_init",
        kind="plain",
        why="takes return_routed_experts and routed_experts_start, which it would refuse",
    ),
    Target(
        attribute="SamplingParams",
        modules=("tensorrt_llm.sampling_params",),
        wrapper=f"{_HERE}.requests:edit_sampling_params",
        kind="edit",
        why="stores the two options where pickle and copy carry them, without a new field",
    ),
    Target(
        attribute="BaseLLM.__init__",
        modules=("tensorrt_llm.llmapi.llm",),
        wrapper=f"{_HERE}.llm:llm_init",
        why="takes enable_return_routed_experts, which the argument model forbids",
    ),
    Target(
        attribute="BaseLlmArgs.from_kwargs",
        modules=("tensorrt_llm.llmapi.llm_args",),
        wrapper=f"{_HERE}.llm:args_from_kwargs",
        why="the arguments are the one object that reaches every worker before its engine is built",
    ),
    Target(
        attribute="BaseLLM._prepare_sampling_params",
        modules=("tensorrt_llm.llmapi.llm",),
        wrapper=f"{_HERE}.llm:prepare_sampling_params",
        why="the first place that sees both the request and its LLM: default and refusals",
    ),
    Target(
        attribute="BaseLLM._check_arguments",
        modules=("tensorrt_llm.llmapi.llm",),
        wrapper=f"{_HERE}.llm:check_arguments",
        needs=("prompt_len", "sampling_params"),
        why="knows the prompt's length, within which the start offset must lie",
    ),
    *(
        Target(
            attribute=f"{session}.{method}",
            modules=("tensorrt_llm.llmapi.mpi_session",),
            wrapper=f"{_HERE}.workers:submit",
            why="every worker task starts here, whatever the launcher did with the environment",
            required=session == "MpiPoolSession" and method == "submit",
        )
        for session in ("MpiPoolSession", "MpiCommSession", "RemoteMpiCommSessionClient")
        for method in ("submit", "submit_sync")
    ),
    Target(
        attribute="GenerationRequest.__init__",
        modules=("tensorrt_llm.executor.request",),
        wrapper=f"{_HERE}.requests:request_init",
        why="carries the weight version of reset() to the worker",
        required=False,
    ),
    Target(
        attribute="BaseWorker._enqueue_request",
        modules=("tensorrt_llm.executor.base_worker",),
        wrapper=f"{_HERE}.requests:worker_enqueue",
        needs=("request",),
        why="the last place that sees the SamplingParams; refuses one request where nothing is captured",
    ),
    Target(
        attribute="PyExecutor.enqueue_request",
        modules=(f"{_PYEXECUTOR}.py_executor",),
        wrapper=f"{_HERE}.requests:executor_enqueue",
        needs=("request",),
        why="the executor request exists here and takes Python attributes",
    ),
    Target(
        attribute="executor_request_to_llm_request",
        modules=(f"{_PYEXECUTOR}.llm_request",),
        wrapper=f"{_HERE}.requests:to_llm_request",
        needs=("executor_request",),
        why="builds the engine's request and its children from a fixed list of attributes",
    ),
    Target(
        attribute="create_py_executor",
        modules=(f"{_PYEXECUTOR}.py_executor_creator",),
        wrapper=f"{_HERE}.executor:create_py_executor",
        needs=("llm_args",),
        why="knows the arguments of the engine whose executors are built inside it, twice",
    ),
    Target(
        attribute="PyExecutor.__init__",
        modules=(f"{_PYEXECUTOR}.py_executor",),
        wrapper=f"{_HERE}.executor:executor_init",
        needs=("resource_manager", "model_engine"),
        why="runs warm-up and captures graphs: the layers must be hooked before it, the model is built",
    ),
    Target(
        attribute="PyTorchModelEngine.forward",
        modules=(f"{_PYEXECUTOR}.model_engine",),
        wrapper=f"{_HERE}.executor:forward",
        why="at its entry the schedule is final, at its exit the rows are on the device",
    ),
    Target(
        attribute="LlmRequest.create_response",
        modules=(f"{_PYEXECUTOR}.llm_request",),
        wrapper=f"{_HERE}.responses:create_response",
        why="the one place where every finished sequence leaves the engine",
    ),
    Target(
        attribute="KVCacheManager.reset_reuse_state",
        modules=(f"{_PYEXECUTOR}.resource_manager",),
        wrapper=f"{_HERE}.executor:reset_reuse_state",
        why="rows of KV blocks are valid as long as the engine finds the blocks",
        required=False,
    ),
    Target(
        attribute="PyExecutor.reset_prefix_cache",
        modules=(f"{_PYEXECUTOR}.py_executor",),
        wrapper=f"{_HERE}.executor:reset_prefix_cache",
        why="trainers call it after new weights: rows get a new version",
        required=False,
    ),
    Target(
        attribute="GenerationResultBase._handle_sequence",
        modules=("tensorrt_llm.executor.result",),
        wrapper=f"{_HERE}.responses:handle_sequence",
        needs=("finish_reasons", "response_tensors", "sequence_index"),
        why="fills the CompletionOutput on the caller's side, after stop words were trimmed",
    ),
    Target(
        attribute="CompletionOutput",
        modules=("tensorrt_llm.executor.result",),
        wrapper=f"{_HERE}.responses:edit_completion_output",
        kind="edit",
        why="has slots, so that routed_experts can only be a property of the class",
    ),
)
