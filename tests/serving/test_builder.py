"""The repository on disk, read with the server's own schema."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'recexp[serving]'")

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from recexp import checkpoint
from recexp.config import ModelConfig, ServingConfig, load_config
from recexp.serving.builder import build

from .conftest import make_model


def read(path: Path):
    return text_format.Parse((path / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("hstu").save(tmp_path_factory.mktemp("checkpoint")).parent


def test_shapes_and_types_come_from_the_model(saved: Path, tmp_path: Path) -> None:
    serving = ServingConfig(dtype="float64")
    assert build(saved, tmp_path / "models", serving) == ["sparse", "dense", "ensemble", "ranking"]
    sparse, dense, ensemble, ranking = (
        read(tmp_path / "models" / n) for n in ("sparse", "dense", "ensemble", "ranking")
    )
    ids = ["USER_IDS", "NUM_PAIRS", "ITEM_IDS", "ACTION_IDS", "NUM_CANDIDATES", "CANDIDATE_IDS", "CONTEXT_age"]
    for model in (sparse, ensemble, ranking):
        assert [tensor.name for tensor in model.input] == ids
        assert all(list(t.dims) == [-1] and t.data_type == model_config_pb2.TYPE_INT64 for t in model.input)
    assert all(tensor.allow_ragged_batch for model in (sparse, dense, ranking) for tensor in model.input)
    assert list(sparse.output[0].dims) == list(dense.input[0].dims) == [-1, 16]
    for model in (dense, ensemble, ranking):
        assert (model.output[0].name, list(model.output[0].dims)) == ("LOGITS", [-1, 2])
        assert model.output[0].data_type == model_config_pb2.TYPE_FP64
    assert [tensor.name for tensor in ranking.output[1:]] == ["TIER", "TOKENS_REUSED"]
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == ["sparse", "dense"]


def test_limits_come_from_the_configuration(saved: Path, tmp_path: Path) -> None:
    limits = dict(max_batch=5, max_queue=7, timeout_ms=11, queue_delay_us=13, num_instances=3)
    build(saved, tmp_path / "models", ServingConfig(**limits))
    for name in ("sparse", "dense", "ranking"):
        model = read(tmp_path / "models" / name)
        queue = model.dynamic_batching.default_queue_policy
        assert model.max_batch_size == 5 and model.dynamic_batching.max_queue_delay_microseconds == 13
        assert (queue.max_queue_size, queue.default_timeout_microseconds, queue.allow_timeout_override) == (
            7,
            11000,
            False,
        )
        assert queue.timeout_action == model_config_pb2.ModelQueuePolicy.REJECT
        assert [group.count for group in model.instance_group] == [1 if name == "ranking" else 3]


def test_every_gpu_has_a_ranking_model_of_its_own(saved: Path, tmp_path: Path) -> None:
    names = build(saved, tmp_path / "models", ServingConfig(devices=["cuda:0", "cuda:3"]))
    assert names == ["sparse", "dense", "ensemble", "ranking_0", "ranking_1"]
    groups = {name: read(tmp_path / "models" / name).instance_group for name in names}
    assert all(g.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU for some in groups.values() for g in some)
    assert [(g.count, list(g.gpus)) for g in groups["ranking_1"]] == [(1, [3])]
    assert [list(g.gpus) for g in groups["sparse"]] == [[0], [3]]


def test_the_repository_needs_nothing_outside(saved: Path, tmp_path: Path) -> None:
    serving = ServingConfig(num_pages=9)
    build(saved, tmp_path / "models", serving)
    inside = tmp_path / "models" / "sparse" / "checkpoint"
    assert checkpoint.load_config_of(inside) == make_model("hstu").config
    assert load_config(inside / "serving.yaml") == serving


def test_refusals_write_nothing(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"there exists; name a new folder"):
        build(saved, tmp_path / "there", ServingConfig())
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        build(tmp_path / "there", tmp_path / "new", ServingConfig())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_page": 3}, "did you mean 'num_pages'"),
        ({"num_pages": 1}, "greater than or equal to 2"),
        ({"devices": ["mps"]}, "devices"),
        ({"devices": []}, "at least 1"),
        ({"max_queue": 0}, "greater than or equal to 1"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_impossible_settings(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServingConfig(**setting)


def test_contexts_are_inputs(tmp_path: Path) -> None:
    folder = make_model("transformer", context={}).save(tmp_path / "checkpoint").parent
    build(folder, tmp_path / "models", ServingConfig())
    assert "CONTEXT" not in (tmp_path / "models" / "ranking" / "config.pbtxt").read_text()
    assert isinstance(load_config(folder / "config.yaml"), ModelConfig)
