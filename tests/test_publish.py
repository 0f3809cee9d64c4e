"""What is said of the package in several files is the same in all of them."""

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_conda_recipe_is_of_this_package():
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    assert recipe["context"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    needs = {each.replace(" ", "") for each in recipe["requirements"]["run"]}
    assert needs == {*PROJECT["dependencies"], f"python{PROJECT['requires-python']}"}
    assert recipe["about"]["license_file"] == PROJECT["license-files"]
    assert [each.split(" = ") for each in recipe["build"]["python"]["entry_points"]] == [
        list(each) for each in PROJECT["scripts"].items()
    ]


def test_each_python_that_the_package_names_is_tested():
    named = [
        each.split(" :: ")[-1]
        for each in PROJECT["classifiers"]
        if each.startswith("Programming Language :: Python :: 3.")
    ]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert named == [each["python"] for each in workflow["jobs"]["each"]["strategy"]["matrix"]["include"]]
    assert PROJECT["requires-python"] == f">={named[0]}"
