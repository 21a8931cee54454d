"""Profiles of SMs: they say what the backends themselves say there, and are careful about what nobody knows."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from recexp.devices import PROFILES, SM_DEPENDENT, UNVERIFIED, profile_of
from recexp.experiments.survey import DTYPES, refusal_on, survey_backends
from recexp.layers.attention import AttentionRequest
from recexp.layers.attention import backends as attention_backends
from recexp.layers.backends import fbgemm, gluon, triton

SMS = [75, *PROFILES, 121]


@pytest.mark.parametrize("sm", SMS)
def test_profiles_agree_with_the_backends(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything installed, a device of this SM: the backend refuses a call exactly where the profile does."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(sm, 10))
    monkeypatch.setattr(triton, "AVAILABLE", True)
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(gluon, "WHY_NOT", None)
    monkeypatch.setattr(fbgemm, "operator", lambda: (lambda: None, frozenset(fbgemm.PAGED)))
    shapes = product(("silu", "softmax"), DTYPES, (32, 48, 64, 128, 256, 257), (None, 12, 16, 32, 64, 128))
    for weighting, dtype, head_dim, page_size in shapes:
        request = AttentionRequest(weighting, torch.device("cuda"), dtype, 2, head_dim, page_size)
        for name in SM_DEPENDENT:
            own, said = attention_backends[name].refuses(request), refusal_on(name, request, profile_of(sm))
            assert (own is None) == (said is None), (name, request, own, said)


def test_b200_runs_fbgemm_on_pages_of_128_only() -> None:
    profile = profile_of("sm100")
    assert profile.page_size == 128 and profile_of(90).page_size == profile_of("SM_120").page_size == 32
    for page_size, answer in ((128, "yes"), (64, "page_size 64 is not (128,)")):
        frame = survey_backends(torch.device("cuda"), 128, page_size, profile).set_index(["backend", "weighting"])
        assert frame.loc[("fbgemm", "silu"), f"bfloat16 pages of {page_size}"] == answer
        assert frame.loc[("triton", "softmax"), f"bfloat16 pages of {page_size}"] == "yes"
        assert frame.loc[("gluon", "silu"), "bfloat16"] == "it has no kernel for SM100"
        assert UNVERIFIED in frame.loc[("fbgemm", "silu"), "note"]


def test_what_we_do_not_have_says_so() -> None:
    for sm, profile in PROFILES.items():
        assert (UNVERIFIED in profile.note) == (sm != 90)
        for name, limits in profile.backends.items():
            assert (UNVERIFIED in limits.note) == (sm != 90 or name == "fbgemm")


def test_unknown_sms_get_a_conservative_answer() -> None:
    assert set(profile_of(121).backends) == {"triton"} and "not known here" in profile_of(121).note
    assert not profile_of(75).backends and UNVERIFIED in profile_of(75).note
    with pytest.raises(ValueError, match=r"'hopper' is no SM; write sm100"):
        profile_of("hopper")
