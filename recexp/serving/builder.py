"""A checkpoint → a Triton model repository: sparse, dense, an ensemble of both, and ranking on every device.

Every tensor has a leading dimension of 1; behind it, users lie one after the other, and lengths tell them apart. So
requests of any lengths can be joined by the server, which counts them by that dimension.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from recexp import checkpoint
from recexp.config import ModelConfig, ServingConfig

CHECKPOINT, SERVING = "sparse/checkpoint", "serving.yaml"  # in the repository; in the checkpoint's folder
IDS = ("user_ids", "num_pairs", "item_ids", "action_ids", "num_candidates", "candidate_ids")  # of a SequenceBatch
Tensors = Mapping[str, tuple[str, list[int]]]  # name → Triton's type, dimensions behind the leading one


def context_inputs(config: ModelConfig) -> dict[str, str]:
    """Input tensor → context feature, for those that are not the user's id itself."""
    return {f"CONTEXT_{name}": name for name in config.context if name != "user_id"}


def build(folder: Path, repository: Path, serving: ServingConfig) -> list[str]:
    """Write the repository for the checkpoint in ``folder``; returns the names of its models.

    Raises ValueError for a folder without a checkpoint, and for a repository folder that exists.
    """
    config = checkpoint.load_config_of(folder)
    if repository.exists():
        raise ValueError(f"{repository} exists; name a new folder, or remove it: a server may be reading it")
    ids: Tensors = {name: ("INT64", [-1]) for name in (*map(str.upper, IDS), *context_inputs(config))}
    real = "FP64" if serving.dtype == "float64" else "FP32"  # half precision inside, FP32 outside
    tokens: Tensors = {"VALUES": (real, [-1, config.hidden_size]), "SEQ_LENGTHS": ("INT64", [-1])}
    dense: Tensors = {**tokens, "NUM_CANDIDATES": ("INT64", [-1])}
    logits: Tensors = {"LOGITS": (real, [-1, config.num_tasks])}
    answer: Tensors = {**logits, "TIER": ("STRING", [-1]), "TOKENS_REUSED": ("INT64", [-1])}
    limits = _limits(serving)
    everywhere = limits + _instances(serving.devices, serving.num_instances)
    models = {
        "sparse": _tensors(ids, tokens) + everywhere,
        "dense": _tensors(dense, logits) + everywhere,
        "ensemble": _tensors(ids, logits) + _steps({"sparse": (ids, tokens), "dense": (dense, logits)}),
    }
    for i, device in enumerate(serving.devices):
        name = "ranking" if len(serving.devices) == 1 else f"ranking_{i}"
        models[name] = _tensors(ids, answer) + limits + _instances([device], 1)
    for name, text in models.items():
        (repository / name / "1").mkdir(parents=True)
        head = f'name: "{name}"\nmax_batch_size: {serving.max_batch}\n'
        (repository / name / "config.pbtxt").write_text(head + text, encoding="utf-8")
        if name != "ensemble":
            code = f"from recexp.serving.models.{name.partition('_')[0]} import TritonPythonModel  # noqa: F401\n"
            (repository / name / "1" / "model.py").write_text(code, encoding="utf-8")
    (repository / CHECKPOINT).mkdir()
    for file in (checkpoint.WEIGHTS, checkpoint.CONFIG):
        shutil.copy(folder / file, repository / CHECKPOINT)
    (repository / CHECKPOINT / SERVING).write_text(serving.to_yaml(), encoding="utf-8")
    return list(models)


def _tensors(inputs: Tensors, outputs: Tensors) -> str:
    text = ""
    for kind, tensors, more in (("input", inputs, "allow_ragged_batch: true"), ("output", outputs, "")):
        for name, (dtype, dims) in tensors.items():
            text += f'{kind} {{ name: "{name}" data_type: TYPE_{dtype} dims: {dims} {more} }}\n'
    return text


def _limits(serving: ServingConfig) -> str:
    policy = f"max_queue_size: {serving.max_queue} default_timeout_microseconds: {1000 * serving.timeout_ms}"
    delay = f"max_queue_delay_microseconds: {serving.queue_delay_us}"
    policy = f"default_queue_policy {{ timeout_action: REJECT {policy} }}"
    return f'backend: "python"\ndynamic_batching {{ {delay} {policy} }}\n'


def _instances(devices: Sequence[str], count: int) -> str:
    text = ""
    for kind, _, index in (device.partition(":") for device in dict.fromkeys(devices)):
        where = "kind: KIND_CPU" if kind == "cpu" else f"kind: KIND_GPU gpus: [{index or 0}]"
        text += f"instance_group {{ count: {count} {where} }}\n"
    return text


def _steps(steps: Mapping[str, tuple[Tensors, Tensors]]) -> str:
    text = 'platform: "ensemble"\nensemble_scheduling {\n'
    for name, (inputs, outputs) in steps.items():
        maps = [f'input_map {{ key: "{n}" value: "{n}" }}' for n in inputs]
        maps += [f'output_map {{ key: "{n}" value: "{n}" }}' for n in outputs]
        text += f'  step {{ model_name: "{name}" model_version: -1 {" ".join(maps)} }}\n'
    return text + "}\n"
