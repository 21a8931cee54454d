"""Answers of the real server: the same logits as the Python call, the right tier, and errors that leave no trace."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'recexp[serving]'")

from tritonclient.utils import InferenceServerException

from recexp import RankingModel, SequenceBatch
from recexp.serving.builder import IDS
from recexp.serving.client import Client

from .conftest import MAX_CANDIDATES, NUM_ITEMS, PAGE_SIZE, make_model, metric, read_metrics, relative, request_of


def join(*batches: SequenceBatch) -> SequenceBatch:
    age = torch.cat([batch.context_ids["age"] for batch in batches])
    return SequenceBatch(**{n: torch.cat([getattr(b, n) for b in batches]) for n in IDS}, context_ids={"age": age})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_returning_users_get_the_logits_and_tiers_of_the_python_call(both, protocol: str) -> None:
    """Histories grow, shrink, change and move their windows; one to four users a request, some without candidates."""
    model, server = both
    mirror = make_model(model.config.backbone)
    cache = mirror.make_cache(num_pages=513, page_size=PAGE_SIZE)
    draw = random.Random(protocol)
    first = 100 if protocol == "http" else 200
    pairs = Counter({first + i: draw.randrange(4) for i in range(9)})
    seen: Counter[str] = Counter()
    with Client(getattr(server, protocol)) as client:
        for _ in range(25):
            users = draw.sample(sorted(pairs), draw.randint(1, 4))
            batch = join(
                *(request_of(u, pairs[u], draw.randrange(MAX_CANDIDATES + 1), seed=draw.random() < 0.1) for u in users)
            )
            expected = model.predict(batch)
            mirror.predict_cached(batch)
            rows = [cache.records[i - len(users)] for i in range(len(users))]
            answer = client.predict(batch)
            assert answer.tiers == [row["tier"] for row in rows]
            assert answer.tokens_reused == [row["tokens_reused"] for row in rows]
            seen.update(answer.tiers)
            uncached, ensemble = client.predict(batch, cache=False), client.predict(batch, "ensemble")
            assert uncached.tiers == ["none"] * len(users) and uncached.tokens_reused == [0] * len(users)
            for logits in (answer.logits, uncached.logits, ensemble.logits):
                assert logits.dtype == np.float64 and logits.shape == tuple(expected.shape)
                assert not len(expected) or relative(logits, expected) < 1e-12
            for user in users:
                pairs[user] = max(0, pairs[user] + draw.randint(-1, 8))
    assert set(seen) == {"device", "partial", "miss"} and max(pairs.values()) > model.config.max_history_pairs


def without(name: str) -> Callable[[Client, dict], None]:
    def change(client: Client, request: dict) -> None:
        request["inputs"] = [tensor for tensor in request["inputs"] if tensor.name() != name]

    return change


def given(name: str, values: list, dtype: str = "INT64", leading: bool = True) -> Callable[[Client, dict], None]:
    def change(client: Client, request: dict) -> None:
        array = np.array([values] if leading else values, dtype={"INT64": np.int64, "FP32": np.float32}[dtype])
        tensor = client.module.InferInput(name, array.shape, dtype).set_data_from_numpy(array)
        request["inputs"] = [tensor if old.name() == name else old for old in request["inputs"]]

    return change


def several(*changes: Callable[[Client, dict], None]) -> Callable[[Client, dict], None]:
    def change(client: Client, request: dict) -> None:
        for one in changes:
            one(client, request)

    return change


HUGE = 2**62  # four of them sum to 0 in 64 bits
REFUSED = {
    "missing tensor": (without("ITEM_IDS"), r"ITEM_IDS"),
    "missing context": (without("CONTEXT_age"), r"CONTEXT_age"),
    "dtype": (given("ITEM_IDS", [1.0, 2.0], "FP32"), r"ITEM_IDS.*FP32.*INT64"),
    "no leading dimension": (given("ITEM_IDS", [1, 2], leading=False), r"'ITEM_IDS' batch size does not match"),
    "three dimensions": (given("ITEM_IDS", [[1, 2]]), r"ITEM_IDS.*\[1,1,2\]"),
    "leading dimension": (
        several(*(given(n, [[0, 0], [0, 0]], leading=False) for n in (*map(str.upper, IDS), "CONTEXT_age"))),
        r"has shape \[2, 2\]: write \[1, …\]",
    ),
    "too few items": (given("ITEM_IDS", [1]), r"item_ids has 1 entries where num_pairs \(sum 2\) asks for 2"),
    "actions": (given("ACTION_IDS", [1, 2, 3]), r"action_ids has 3 entries"),
    "negative length": (given("NUM_PAIRS", [-2]), r"num_pairs of row 0 is -2"),
    "two users": (given("USER_IDS", [1, 2]), r"a batch of 2 users"),
    "item": (given("ITEM_IDS", [0, NUM_ITEMS]), r"item_ids of row 0 holds 60; num_items is 60"),
    "negative item": (given("CANDIDATE_IDS", [0, -1, 2]), r"candidate_ids of row 0 holds -1"),
    "action": (given("ACTION_IDS", [6, 0]), r"action_ids of row 0 holds 6; num_actions is 6"),
    "user": (given("USER_IDS", [1000]), r"'user_id' of row 0 holds 1000"),
    "negative user": (given("USER_IDS", [-1]), r"'user_id' of row 0 holds -1"),
    "context": (given("CONTEXT_age", [3]), r"'age' of row 0 holds 3"),
    "candidates": (
        several(given("NUM_CANDIDATES", [13]), given("CANDIDATE_IDS", [1] * 13)),
        r"row 0 has 13 candidates; the model's max_candidates is 12",
    ),
    "overflow": (
        several(
            *(given(n, [0, 1, 2, 3]) for n in ("USER_IDS", "NUM_CANDIDATES")),
            *(given(n, []) for n in ("ITEM_IDS", "ACTION_IDS")),
            given("NUM_PAIRS", [HUGE] * 4),
            given("CANDIDATE_IDS", [0] * 6),
            given("CONTEXT_age", [0] * 4),
        ),
        r"NUM_PAIRS holds 4611686018427387904; no length is above 2147483647",
    ),
}


def assert_as_before(client: Client, model: RankingModel, server, pages: float) -> None:
    assert client.triton.is_server_ready() and client.triton.is_model_ready("ranking")
    assert metric(server, "recexp_pages_in_use") == pages
    batch = request_of(7, 9)
    answer = client.predict(batch)
    assert answer.tiers == ["device"] and answer.tokens_reused == [2 + 2 * 9]
    assert relative(answer.logits, model.predict(batch)) < 1e-12


@pytest.mark.parametrize("model_name", ["ranking", "ensemble"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_malformed_request_gets_a_sentence_and_changes_nothing(
    hstu, client: Client, case: str, model_name: str
) -> None:
    model, server = hstu
    client.predict(request_of(7, 9))
    pages = metric(server, "recexp_pages_in_use")
    change, sentence = REFUSED[case]
    request = client.request(request_of(7, 2))
    change(client, request)
    with pytest.raises(InferenceServerException) as refused:
        client.triton.infer(model_name, **request)
    text = str(refused.value)
    assert re.search(sentence, text), text
    assert not re.search(r"Traceback|\.py|/\w+/", text), text
    assert_as_before(client, model, server, pages)


@pytest.mark.parametrize("value", ["false", 0, 5])
def test_cache_is_true_or_false(hstu, client: Client, value: object) -> None:
    request = client.request(request_of(7, 2)) | {"parameters": {"cache": value}}
    with pytest.raises(InferenceServerException, match=f"the parameter cache is {value!r}; it is true or false"):
        client.triton.infer("ranking", **request)


@pytest.mark.parametrize(
    ("values", "lengths", "candidates", "sentence"),
    [
        (np.nan, [6], [2], "VALUES holds NaN or infinity"),
        (np.inf, [6], [2], "VALUES holds NaN or infinity"),
        (1, [5], [2], "seq_offsets run from 0 to 5; 6 tokens need 0 to 6"),
        (1, [7, -1], [2, 0], "seq_offsets fall from 7 to 6 at row 1"),
        (1, [HUGE] * 4 + [6], [2] * 5, "SEQ_LENGTHS holds 4611686018427387904"),
        (1, [6], [7], "row 0 has 7 candidates and 6 tokens"),
        (1, [6], [-1], "row 0 has -1 candidates"),
        (1, [6], [2, 0], "B users need B . 1 and B"),
    ],
)
def test_tokens_that_are_no_batch(
    hstu, client: Client, values: float, lengths: list[int], candidates: list[int], sentence: str
) -> None:
    arrays = {
        "VALUES": np.full((1, 6, 16), values, np.float64),
        "SEQ_LENGTHS": np.array([lengths]),
        "NUM_CANDIDATES": np.array([candidates]),
    }
    types = ("FP64", "INT64", "INT64")
    inputs = [
        client.module.InferInput(name, array.shape, dtype).set_data_from_numpy(array)
        for (name, array), dtype in zip(arrays.items(), types, strict=True)
    ]
    with pytest.raises(InferenceServerException, match=sentence):
        client.triton.infer("dense", inputs)


def test_what_the_cache_refuses(hstu, client: Client) -> None:
    model, server = hstu
    client.predict(request_of(7, 9))
    pages = metric(server, "recexp_pages_in_use")
    for batch, sentence in (
        (join(request_of(7, 9), request_of(8, 3), request_of(7, 1)), r"user 7 is in rows 0 and 2: split the batch"),
        (join(*(request_of(user, 20) for user in range(7, 60))), r"out of pages: the batch needs \d+ more"),
    ):
        with pytest.raises(InferenceServerException, match=sentence):
            client.predict(batch)
        assert_as_before(client, model, server, pages)


def test_requests_without_users_history_or_candidates(hstu, client: Client) -> None:
    model, _ = hstu
    for batch in (request_of(90, 0), request_of(91, 5, 0), request_of(92, 0, 0)):
        for name in ("ranking", "ensemble"):
            logits = client.predict(batch, name).logits
            assert logits.shape == (int(batch.num_candidates.sum()), 2)
            assert not len(logits) or relative(logits, model.predict(batch)) < 1e-12
    nobody = SequenceBatch.from_lists([], [], [], [], {"age": []})
    assert [client.predict(nobody, name).logits.shape for name in ("ranking", "ensemble")] == [(0, 2)] * 2


def clients_at_once(server, requests: list[list[tuple[SequenceBatch, torch.Tensor]]]) -> list[str]:
    """Each list by a client of its own, HTTP and gRPC in turn; returns what went wrong."""
    wrong: list[str] = []

    def work(number: int) -> None:
        with Client((server.http, server.grpc)[number % 2]) as client:
            for batch, expected in requests[number]:
                try:
                    logits = client.predict(batch, cache=number != 3).logits
                    if not relative(logits, expected) < 1e-12:
                        wrong.append(f"user {batch.user_ids.tolist()} got other logits")
                except Exception as error:
                    wrong.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_requests_of_one_user_at_once_are_never_mixed(hstu) -> None:
    """Eight clients with other histories of the same user, each right for its own."""
    model, server = hstu
    some = [request_of(300, pairs, seed=seed) for pairs in (2, 9, 20) for seed in (1, 2)]
    known = [(batch, model.predict(batch)) for batch in some]
    draw = random.Random(0)
    assert clients_at_once(server, [[draw.choice(known) for _ in range(25)] for _ in range(8)]) == []


def test_sixteen_clients_lose_none_of_2000_requests_and_the_server_joins_some(hstu) -> None:
    model, server = hstu
    some = [request_of(400 + user, pairs) for user in range(20) for pairs in (3, 8, 15, 20)]
    known = [(batch, model.predict(batch)) for batch in some]
    names = ("recexp_requests_total", "nv_inference_exec_count", "recexp_latency_seconds_count")
    labels = ({"status": "ok"}, {"model": "ranking"}, {})
    before = [metric(server, name, **some) for name, some in zip(names, labels, strict=True)]
    draw = random.Random(1)
    assert clients_at_once(server, [[draw.choice(known) for _ in range(125)] for _ in range(16)]) == []
    after = [metric(server, name, **some) for name, some in zip(names, labels, strict=True)]
    answered, executions, measured = (new - old for new, old in zip(after, before, strict=True))
    assert answered == measured == 2000 and executions < 1500


def test_metrics_count_what_was_asked(hstu) -> None:
    _, server = hstu
    names = ["recexp_users_total", "recexp_tokens_reused_total", "recexp_tokens_computed_total", "recexp_pages_in_use"]
    with Client(server.grpc) as client:
        client.predict(request_of(600, 4))  # 2 context tokens, 8 of pairs
        before = {name: metric(server, name) for name in names}
        tiers = {tier: metric(server, names[0], tier=tier) for tier in ("device", "miss", "none")}
        client.predict(request_of(600, 6))
        client.predict(request_of(601, 1))
        client.predict(request_of(600, 6), cache=False)
    gained = {name: metric(server, name) - value for name, value in before.items()}
    assert list(gained.values()) == [3, 10, 4 + 4, 1 + 1]  # pages of 4: from 10 to 14 tokens, and one for 4 tokens
    assert {tier: metric(server, names[0], tier=tier) - value for tier, value in tiers.items()} == dict.fromkeys(
        tiers, 1
    )
    text = read_metrics(server)
    assert "# TYPE recexp_latency_seconds histogram" in text and "# TYPE recexp_pages_in_use gauge" in text
    assert metric(server, "recexp_pages") == 512
    assert metric(server, "recexp_latency_seconds_bucket", le="+Inf") == metric(server, "recexp_latency_seconds_count")
    assert metric(server, "recexp_latency_seconds_sum") > 0


def test_probing_asks_for_an_answer_and_leaves_the_cache(hstu, client: Client) -> None:
    pages = metric(hstu[1], "recexp_pages_in_use")
    assert client.probe() is client.probe("ensemble") is None
    assert "no_such" in client.probe("no_such")
    assert metric(hstu[1], "recexp_pages_in_use") == pages


def test_nothing_listens_but_on_the_loopback_address(hstu) -> None:
    ports = {f"{port:04X}" for port in hstu[1].ports}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    listening = [line[1].split(":") for line in lines if line[3] == "0A" and line[1].rpartition(":")[2] in ports]
    assert {port for _, port in listening} == ports
    assert {address.removeprefix("0000000000000000FFFF0000") for address, _ in listening} == {"0100007F"}  # 127.0.0.1
