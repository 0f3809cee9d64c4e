"""Which records the check finds old, in repositories made for each test."""

import json
import subprocess
from pathlib import Path

import pytest
from check_records import check
from harness import record
from harness.judges import JUDGES

POLICY = '''"""Decides sizes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["sizes"]
LARGEST = 512
"""Of a batch."""


class Policy:
    largest: int = LARGEST


def sizes(speeds):
    if not speeds:
        raise ValueError("no speeds")
    return [min(LARGEST, speed) for speed in speeds]
'''
FILES = {
    "README.md": "[2 times](benchmarks/results/steady-4.json)\n",
    "docs/numbers.md": "No figure.\n",
    "benchmarks/known_old.toml": "",
    "benchmarks/steady.py": "from harness import clusters, record\n\nPASSES = 3\n",
    "benchmarks/harness/clusters.py": "SPEEDS = (1, 2)\n",
    "benchmarks/harness/record.py": "WIDTH = 110\n",
    "src/evenstep/core/load/policy.py": POLICY,
    "src/evenstep/core/load/measured.toml": "curve = 1\n",
    "src/evenstep/cli/run.py": "WIDTH = 80\n",
}
POLICY_PATH = "src/evenstep/core/load/policy.py"
RECORD_PATH = "benchmarks/results/steady-4.json"


class Repository:
    def __init__(self, root):
        self.root = root
        root.mkdir()
        self.git("init", "--quiet")
        for name, text in FILES.items():
            self.write(name, text)
        self.commit()
        self.measure()

    def git(self, *command):
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *command], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def replace(self, name, old, new):
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "A change")
        return self.git("rev-parse", "HEAD")

    def measure(self, commit=None, changes=False):
        environment = {"git_commit": commit or self.git("rev-parse", "HEAD"), "git_changes": changes}
        command = "python benchmarks/steady.py --workers 4"
        self.write(RECORD_PATH, json.dumps({"command": command, "environment": environment}))
        self.commit()

    def wrong(self):
        return " ".join(check(self.root)[1])


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for module in ("harness.changed", "check_records"):
        monkeypatch.setattr(f"{module}.JUDGES", {"steady": ("core/load",)})
    return Repository(tmp_path / "repository")


def test_a_record_of_the_present_code_is_right(repository):
    assert check(repository.root) == ([], [])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (POLICY_PATH, "Decides sizes.", "Decides the sizes of batches."),
        (POLICY_PATH, "Of a batch.", "Samples of one batch."),
        (POLICY_PATH, "    return [", "    # In samples.\n    return ["),
        (POLICY_PATH, '"no speeds"', '"there are no speeds"'),
        (POLICY_PATH, "Sequence", "Iterable"),
        (POLICY_PATH, '["sizes"]', '["fewest", "sizes"]'),
        (POLICY_PATH, "def sizes", "def fewest(speeds):\n    return 1\n\n\ndef sizes"),
        (POLICY_PATH, "largest: int", "smallest: int = 1\n    largest: int"),
        (POLICY_PATH, "import TYPE_CHECKING", "import TYPE_CHECKING, Final"),
        ("src/evenstep/cli/run.py", "80", "120"),
        ("benchmarks/harness/record.py", "110", "120"),
        ("docs/numbers.md", "No figure", "None"),
    ],
)
def test_what_changes_no_figure_outdates_no_record(repository, name, old, new):
    repository.replace(name, old, new)
    assert repository.wrong() == ""


def test_a_new_file_outdates_no_record(repository):
    repository.write("src/evenstep/core/load/other.py", "SMALLEST = 1\n")
    repository.commit()
    assert repository.wrong() == ""


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (POLICY_PATH, "LARGEST = 512", "LARGEST = 256"),
        (POLICY_PATH, "min(LARGEST, speed)", "speed"),
        (POLICY_PATH, "class Policy", "class Policy(Base)"),
        (POLICY_PATH, "largest: int = LARGEST", "largest: int = 1"),
        (POLICY_PATH, "ValueError", "TypeError"),
        (POLICY_PATH, "from typing", "from typing_extensions"),
        (POLICY_PATH, "def sizes", "def unfinished("),
        ("src/evenstep/core/load/measured.toml", "1", "2"),
        ("benchmarks/steady.py", "3", "5"),
        ("benchmarks/harness/clusters.py", "(1, 2)", "(1, 4)"),
    ],
)
@pytest.mark.parametrize("committed", [True, False])
def test_what_can_change_a_figure_outdates_its_record(repository, name, old, new, committed):
    repository.replace(name, old, new)
    if committed:
        repository.commit()
    assert f"steady-4: older than {name}: measure it anew" in repository.wrong()


def test_a_file_that_is_gone_outdates_a_record(repository):
    (repository.root / POLICY_PATH).unlink()
    assert f"older than {POLICY_PATH}" in repository.wrong()


def test_a_record_from_before_there_was_what_it_judges_is_old(repository, monkeypatch):
    monkeypatch.setattr("harness.changed.JUDGES", {"steady": ("core/sync",)})
    repository.write("src/evenstep/core/sync/bounded.py", "BOUND = 3\n")
    assert "older than src/evenstep/core/sync" in repository.wrong()


def test_a_benchmark_that_is_not_in_the_table_judges_all_of_evenstep(repository, monkeypatch):
    monkeypatch.setattr("harness.changed.JUDGES", {})
    assert "steady-4" not in repository.wrong()
    repository.replace("src/evenstep/cli/run.py", "80", "120")
    assert "older than src/evenstep/cli/run.py" in repository.wrong()


def test_a_path_that_is_gone_must_go_from_the_table(repository, monkeypatch):
    monkeypatch.setattr("harness.changed.JUDGES", {"steady": ("core/load", "core/gone.py")})
    assert "src/evenstep/core/gone.py: no such path" in repository.wrong()


@pytest.mark.parametrize("beside", [True, False])
def test_a_commit_outside_the_history_is_wrong(repository, beside):
    commit = "0" * 40
    if beside:
        main = repository.git("branch", "--show-current")
        repository.git("switch", "--quiet", "--create", "other")
        repository.replace("docs/numbers.md", "No figure", "None")
        commit = repository.commit()
        repository.git("switch", "--quiet", main)
    repository.measure(commit)
    assert "steady-4: its commit is not in the history of HEAD" in repository.wrong()


def test_a_shallow_clone_says_that_it_cannot_tell(repository, tmp_path):
    repository.git("clone", "--quiet", "--depth", "1", f"file://{repository.root}", str(tmp_path / "shallow"))
    shown, wrong = check(tmp_path / "shallow")
    assert shown == ["1 records are not checked: this clone lacks the history with their commits."]
    assert wrong == []


def test_a_record_made_with_changes_is_wrong(repository):
    repository.measure(changes=True)
    assert "steady-4: made with uncommitted changes" in repository.wrong()


def test_an_old_record_can_be_excused_with_a_reason(repository):
    repository.replace("benchmarks/steady.py", "3", "5")
    repository.write("benchmarks/known_old.toml", 'steady-4 = "to be measured anew"\n')
    assert check(repository.root) == (["steady-4: older than benchmarks/steady.py: to be measured anew"], [])


def test_an_excuse_that_is_not_needed_is_wrong(repository):
    repository.write("benchmarks/known_old.toml", 'steady-4 = "to be measured anew"\nsteady-8 = "the same"\n')
    assert "steady-4: nothing to excuse" in repository.wrong()
    assert "steady-8: no such record" in repository.wrong()


def test_a_record_that_no_document_quotes_only_warns(repository):
    repository.replace("benchmarks/steady.py", "3", "5")
    repository.write("README.md", "No figure.\n")
    assert check(repository.root) == (
        ["warning: no document quotes steady-4, older than benchmarks/steady.py"],
        [],
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("benchmarks/results/steady-8.json", False),
        ("docs/numbers.md", False),
        ("src/evenstep/cli/run.py", False),
        (POLICY_PATH, True),
        ("benchmarks/steady.py", True),
    ],
)
def test_a_new_record_says_whether_what_it_judges_is_committed(repository, monkeypatch, name, changes):
    monkeypatch.setattr(record, "ROOT", repository.root)
    options = record.arguments("").parse_args([])
    repository.write(name, "{}\n")
    found = record.environment(options.commit, "steady")
    assert found["git_commit"] == repository.git("rev-parse", "HEAD")
    assert found["git_changes"] is changes


def test_a_record_names_the_commit_at_its_start(repository, monkeypatch):
    monkeypatch.setattr(record, "ROOT", repository.root)
    commit = record.arguments("").parse_args([]).commit
    repository.replace(POLICY_PATH, "512", "256")
    repository.commit()
    assert record.environment(commit, "steady")["git_changes"] is True


def test_a_benchmark_that_is_not_committed_has_changes(repository, monkeypatch):
    monkeypatch.setattr(record, "ROOT", repository.root)
    repository.write("benchmarks/new.py", "PASSES = 3\n")
    assert record.environment(repository.git("rev-parse", "HEAD"), "new")["git_changes"] is True


def test_each_benchmark_with_a_record_says_what_it_judges():
    scripts = {path.stem for path in Path(record.RESULTS.parent).glob("*.py") if "record.publish(" in path.read_text()}
    assert scripts == set(JUDGES)
