"""Planning: every expected test is listed, and a claim whose tests are not as claimed is never run as if they were."""

import pytest

from harness import costs, revision
from harness.plan import Planner, Request, job_name, parse_budget
from harness.spec import ClaimStatus, HarnessError


def planned(toy, tmp_path, *names, statuses=(), durations=None, unavailable=None, toolchain=None,
            **request):  # fmt: skip
    """Plan the toy as it is now."""
    snapshot = revision.take(toy.root, tmp_path / "copy")
    planner = Planner(root=toy.root, snapshot=snapshot, request=Request(names=names, **request),
                      statuses=list(statuses), durations=durations or {}, unavailable=unavailable or {},
                      toolchain=toolchain or {})  # fmt: skip
    return planner.plan()


def cell(plan, claim="toy.double"):
    """One claim's cell."""
    return next(cell for cell in plan.cells if cell.claim == claim)


def status(state, **more):
    """What a ledger might say of the toy's claim."""
    return ClaimStatus(id="toy.double", text="", topology="cpu1", state=state, **more)


def test_parameters_are_listed(toy, tmp_path):
    """A claim's entry without parameters selects all of them, each an expected test of one job."""
    toy.write("suites/many.py", "import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_x(x): pass\n")
    toy.claim("toy.many", "suites/many.py::test_x")
    plan = planned(toy, tmp_path, "toy.many")
    (job,) = plan.expected
    assert job.tests == ("suites/many.py::test_x[1]", "suites/many.py::test_x[2]")
    assert (job.job, job.claims, cell(plan, "toy.many").jobs) == ("cpu1.many.0", ("toy.many",), ("cpu1.many.0",))


def test_shards(toy, tmp_path):
    """A long suite file is cut where the profile says so, and the claim waits for all of its jobs."""
    toy.write("suites/many.py", "import pytest\n@pytest.mark.parametrize('x', [1, 2, 3])\ndef test_x(x): pass\n")
    toy.claim("toy.many", "suites/many.py::test_x")
    plan = planned(toy, tmp_path, "toy.many", tests_per_job=2)
    assert [(job.job, len(job.tests), job.claims) for job in plan.expected] == [
        ("cpu1.many.0", 2, ("toy.many",)), ("cpu1.many.1", 1, ("toy.many",))]  # fmt: skip
    assert cell(plan, "toy.many").jobs == ("cpu1.many.0", "cpu1.many.1")


def test_shared_tests_run_once(toy, tmp_path):
    """Two claims on one test share one job and list the test once."""
    toy.claim("toy.again", "suites/toy.py::test_double")
    (job,) = planned(toy, tmp_path).expected
    assert (job.tests, job.claims) == (("suites/toy.py::test_double",), ("toy.double", "toy.again"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def test_renamed(): pass", "is claimed and not collected; was it renamed, deleted or deselected?"),
        ("def test_double(): pass\ndef test_double(): pass", "defines test_double more than once"),
        ("import pytest\npytest.skip('no', allow_module_level=True)", "skipped as a whole: Skipped: no"),
        ("import nowhere", "No module named 'nowhere'"),
        ("def test_double(:", "suites/toy.py:1:"),
        ("import pytest\n@pytest.mark.ranks(4)\ndef test_double(): pass", "is marked ranks(4), but cpu1 has 1"),
        ("import pytest\n@pytest.fixture(scope='module')\ndef f(): pass\ndef test_double(f): pass", "function-scoped"),
    ],
)
def test_broken(toy, tmp_path, text, reason):
    """A claim whose test is not collected as claimed is not run, and says why; the other claims go on."""
    toy.write("suites/other.py", "def test_other(): pass\n")
    toy.claim("toy.other", "suites/other.py::test_other")
    toy.write("suites/toy.py", text)
    plan = planned(toy, tmp_path)
    assert cell(plan).action == "broken"
    assert reason in cell(plan).reason
    assert cell(plan, "toy.other").action == ("broken" if "function-scoped" in reason else "run")


def test_deleted_suite(toy, tmp_path):
    """A suite file that is gone breaks its claims by name."""
    (toy.root / "suites" / "toy.py").unlink()
    assert cell(planned(toy, tmp_path)).reason == "suites/toy.py does not exist; was it renamed?"


def test_unknown_name(toy, tmp_path):
    """A mistyped suite is refused with the closest names."""
    with pytest.raises(HarnessError, match="no suite, claim or test file is called 'quik'; did you mean quick"):
        planned(toy, tmp_path, "quik")


@pytest.mark.parametrize("name", ["quick", "toy", "toy.double", "suites/toy.py", "suites/toy.py::test_double"])
def test_names(toy, tmp_path, name):
    """A suite, a family of claims, a claim, a file and a test each select the claim."""
    assert cell(planned(toy, tmp_path, name)).action == "run"


@pytest.mark.parametrize(("state", "action"), [("proven", "keep"), ("refuted", "keep"), ("flaky", "keep"),
                                               ("expired", "run"), ("unproven", "run")])  # fmt: skip
def test_settled(toy, tmp_path, state, action):
    """What is settled at this tree is kept with its run named; the rest runs."""
    found = cell(planned(toy, tmp_path, statuses=[status(state, run="r1", expired_by="k3/math.py: double changed")]))
    assert found.action == action
    assert ("run r1" if action == "keep" else "k3/math.py" if state == "expired" else "") in found.reason


def test_another_toolchain(toy, tmp_path):
    """What is proven with another torch than this one is not kept: it is run here, too."""
    there = status("proven", run="r1", toolchain="torch 2.11.0, python 3.11")
    for version, action in (("2.11.0", "keep"), ("2.13.0", "run")):
        toolchain = {"torch": version, "triton": "3.6", "python": "3.11"}
        assert cell(planned(toy, tmp_path / version, statuses=[there], toolchain=toolchain)).action == action


def test_all(toy, tmp_path):
    """--all runs what is settled, too."""
    assert cell(planned(toy, tmp_path, statuses=[status("proven")], everything=True)).action == "run"


def test_inputs(toy, tmp_path, monkeypatch):
    """A missing input, or one with other contents, is a need with its remedy; a present one travels to the job."""
    digest = revision.sha256(toy.write("../given/data.bin", "payload"))
    toy.claims.insert(0, f'[inputs.given]\nenv = "TOY_GIVEN"\nfiles = {{ "data.bin" = "{digest}" }}\n')
    toy.claim("toy.needy", "suites/toy.py::test_double", more='inputs = ["given"]')
    found = cell(planned(toy, tmp_path / "a", "toy.needy"), "toy.needy")
    assert (found.action, found.reason) == ("needs", "set TOY_GIVEN to a folder with data.bin")
    monkeypatch.setenv("TOY_GIVEN", str(tmp_path / "given"))
    plan = planned(toy, tmp_path / "b", "toy.needy")
    assert (plan.inputs, plan.env) == ({"given": {"data.bin": digest}}, {"TOY_GIVEN": str(tmp_path / "given")})
    (tmp_path / "given" / "data.bin").write_text("other")
    assert "has another SHA-256" in cell(planned(toy, tmp_path / "c", "toy.needy"), "toy.needy").reason


def test_cost_and_budget(toy, tmp_path):
    """Cost comes from past durations; a budget keeps the cheapest cells and says what it left out."""
    toy.write("suites/slow.py", "def test_slow(): pass\n")
    toy.claim("toy.slow", "suites/slow.py::test_slow")
    durations = {"suites/slow.py::test_slow": 600.0, "suites/toy.py::test_double": 1.0}
    plan = planned(toy, tmp_path, durations=durations, budget="60cpus")
    assert (cell(plan).action, cell(plan, "toy.slow").action) == ("run", "over_budget")
    assert cell(plan, "toy.slow").cpu_s == 600 + costs.START_S
    assert (plan.cpu_s, plan.gpu_s, cell(plan).estimated) == (1 + costs.START_S, 0, False)


def test_elsewhere(toy, tmp_path):
    """A topology the cluster cannot run is named, not planned."""
    found = cell(planned(toy, tmp_path, unavailable={"cpu1": "needs 8 GPUs"}))
    assert (found.action, found.reason) == ("elsewhere", "needs 8 GPUs")


def test_budget_units():
    """A budget is a number with a unit; anything else is refused with an example."""
    assert parse_budget("4gpuh") == ("gpu_s", 14400.0)
    with pytest.raises(HarnessError, match="write 4gpuh"):
        parse_budget("a lot")


def test_job_names():
    """A job's name holds nothing of the machine, and no character a file system or a scheduler could refuse."""
    assert job_name("gloo4", "suites/deep/golden_kda.py") == "gloo4.deep-golden_kda.0"
