"""Comparing numbers: verdict words, exact tests, and what must not be compared."""

import pytest

pytest.importorskip("scipy", reason="needs the extra `analysis`")

from ledger import bench
from ledger.bench import Key, Sample

KEY = Key(test="suites/b.py::test_b", measure="duration", unit="s", direction="lower", shape="T=8", dtype="bf16")
PLACE = dict.fromkeys((*bench.MUST_MATCH, "gpu"), "x")
NOISE = [0.000, 0.004, -0.003, 0.002, -0.005, 0.001, 0.003, -0.002]


def side(base, start, count=8, **changes):
    """`count` processes around `base` seconds, every other second from `start`."""
    fields = {"run": "r", "node": "n", "place": PLACE, "choice": "{}", "is_void": False} | changes
    return [
        Sample(value=base * (1 + NOISE[i] / (1 + start)), started_at=2.0 * i + start, **fields) for i in range(count)
    ]


def verdict(old, new, **options):
    return bench.compare({KEY: old}, {KEY: new}, **options)[0]


def test_faster_and_slower():
    """A clear change is told with its ratio; a slowdown stays unconfirmed until a later allocation agrees."""
    found = verdict(side(1.0, 0), side(0.8, 1))
    assert (found.verdict, round(found.ratio, 2)) == ("faster", 0.8)
    old, new = side(1.0, 0), side(1.2, 1)
    assert verdict(old, new).verdict == "slower-unconfirmed"
    assert verdict(old, new, confirm=({KEY: old}, {KEY: new})).verdict == "slower"
    assert verdict(old, new, confirm=({KEY: old}, {KEY: side(1.0, 1)})).verdict == "slower-unconfirmed"


def test_higher_is_better():
    """Of a rate, more is faster."""
    key = Key(**{name: getattr(KEY, name) for name in KEY.__struct_fields__} | {"direction": "higher"})
    assert bench.compare({key: side(1.0, 0)}, {key: side(1.3, 1)})[0].verdict == "faster"


def test_same_says_what_it_could_have_seen():
    """No change: same, with the smallest change that would have shown."""
    found = verdict(side(1.0, 0), side(1.0, 1))
    assert found.verdict == "same"
    assert "smallest change it could have seen 0." in found.reason


def test_small_effects_are_the_same():
    """A significant change below the minimum effect is no change."""
    assert verdict(side(1.0, 0), side(1.01, 1)).verdict == "same"


def test_noise_cannot_tell():
    """With wide noise nothing is claimed, and the reason says how much could not be seen."""
    noisy = [Sample(run="r", node="n", place=PLACE, choice="{}", is_void=False, started_at=2.0 * i + 1, value=v)
             for i, v in enumerate([0.7, 1.4, 0.9, 1.3, 0.8, 1.2, 1.1, 0.75])]  # fmt: skip
    found = verdict(side(1.0, 0), noisy)
    assert found.verdict == "cannot-tell"
    assert "could not be seen" in found.reason


def test_five_processes_cannot_tell():
    """Fewer than six pairs of processes decide nothing."""
    assert verdict(side(1.0, 0, 5), side(0.5, 1, 5)).reason == "5 pairs of processes, 6 are needed"


def test_processes_must_be_interleaved():
    """All of one side and then all of the other is not a comparison."""
    found = verdict(side(1.0, 0), side(0.5, 100))
    assert (found.verdict, "not interleaved" in found.reason) == ("cannot-tell", True)


@pytest.mark.parametrize("name", [*bench.MUST_MATCH, "gpu"])
def test_other_place_is_not_comparable(name):
    """Another GPU, driver, CUDA, triton, ptxas or processor is never a number."""
    found = verdict(side(1.0, 0), side(0.5, 1, place=PLACE | {name: "y"}))
    assert (found.verdict, found.reason, found.ratio) == ("not-comparable", f"different {name}: x / y", None)


def test_other_choice_is_not_comparable():
    """Another path or autotune choice is another program."""
    assert verdict(side(1.0, 0), side(0.5, 1, choice='{"path": "slow"}')).verdict == "not-comparable"


def test_void_and_missing_numbers():
    """A failing test's number is void; a benchmark without a number is told as such."""
    assert "void" in verdict(side(1.0, 0), side(0.5, 1, is_void=True)).reason
    assert bench.compare({KEY: side(1.0, 0)}, {})[0].verdict == "not-measured"


def test_holm_is_applied_over_the_suite():
    """One p of 1/64 among ten tests is not enough: the correction is over all of them."""
    keys = [Key(**{n: getattr(KEY, n) for n in KEY.__struct_fields__} | {"test": f"t{i}"}) for i in range(10)]
    old = {key: side(1.0, 0, 6) for key in keys}
    new = {key: side(0.8 if key is keys[0] else 1.0, 1, 6) for key in keys}
    assert bench.compare({keys[0]: old[keys[0]]}, {keys[0]: new[keys[0]]})[0].verdict == "faster"
    assert bench.compare(old, new)[0].verdict == "same" or bench.compare(old, new)[0].p > 0.05


def test_peers_are_compared_within_their_process():
    """Peers timed in the same processes get a verdict of their own."""
    found = [
        Sample(**{n: getattr(s, n) for n in s.__struct_fields__} | {"peers": {"fla": s.value * 1.1}})
        for s in side(1.0, 0)
    ]
    assert [(c.against, c.verdict) for c in bench.against_peers({KEY: found})] == [("fla", "faster")]
