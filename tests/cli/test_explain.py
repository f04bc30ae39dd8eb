"""Every code that zbc raises has its long text, and every text its code."""

import re
from pathlib import Path

import pytest

import zbc as package
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.explain import CATALOGUE, FAMILIES

ROOT = Path(package.__file__).parent
EXPLAIN = ROOT / "explain"
SOURCES = ROOT.glob("**/*.py")


def test_the_catalogue_has_exactly_the_codes_that_are_raised():
    raised = {code for path in SOURCES for code in re.findall(r"\bE\d{3}\b", path.read_text())}
    assert len(raised) > 40
    assert raised == set(CATALOGUE)


def test_a_code_stands_in_one_file_with_those_of_its_family():
    """Files of other families could hide it otherwise, one section taking the place of another."""
    found = [re.findall(r"^## (E\d{3}) ", path.read_text(), re.MULTILINE) for path in sorted(EXPLAIN.glob("*.md"))]
    assert [code for codes in found for code in codes] == list(CATALOGUE)
    assert all(len({code[1] for code in codes}) == 1 for codes in found)


@pytest.mark.parametrize("code", few(CATALOGUE, lambda code: code.endswith("1")))
def test_each_code_is_explained_in_words_that_fit_a_terminal(code, zbc):
    ran = zbc("explain", code.lower())
    assert ran.code == 0
    entry = CATALOGUE[code]
    assert ran.out.startswith(f"{code}: {entry.title}\n{FAMILIES[code[1]]}\n")
    assert len(entry.text) > 60
    assert max(map(len, ran.out.split("\n"))) <= 80


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_names_the_exit_code_its_errors_have(family):
    number = re.search(r"exit code (\d)", FAMILIES[family])[1]
    assert ZbcError(f"E{family}01", "x").exit_code == int(number)


def test_without_a_code_all_are_listed(zbc):
    out = zbc("explain").out
    assert [line.split()[0] for line in out.strip().split("\n")[1:]] == list(CATALOGUE)
