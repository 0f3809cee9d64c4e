"""The commit in a run's record is the one that git itself names."""

import subprocess

from evenstep.worker.opening import command, commit_of


def git(folder, *words):
    about = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    return subprocess.run(
        ["git", *about, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_is_the_one_that_git_names(tmp_path):
    repository, inside = tmp_path / "repository", tmp_path / "repository" / "scripts"
    inside.mkdir(parents=True)
    git(repository, "init", "-q", "-b", "main")
    assert commit_of(inside) == ""  # Nothing is committed yet.
    git(repository, "commit", "-q", "--allow-empty", "-m", "first")
    head = git(repository, "rev-parse", "HEAD")[:12]
    assert commit_of(inside) == head
    git(repository, "pack-refs", "--all")
    assert commit_of(inside) == head
    git(repository, "worktree", "add", "-q", tmp_path / "other")
    assert commit_of(tmp_path / "other") == head
    git(repository, "checkout", "-q", "--detach")
    assert commit_of(inside) == head
    assert commit_of(tmp_path) == ""


def test_the_command_is_told_without_what_is_secret(monkeypatch):
    typed = ["runs/train.py", "--hf-token", "abc", "--api_key=d e", "--max-tokens", "9", "--use-key", "--name", "a b"]
    monkeypatch.setattr("sys.argv", typed)
    assert command() == "train.py --hf-token *** '--api_key=***' --max-tokens 9 --use-key --name 'a b'"
