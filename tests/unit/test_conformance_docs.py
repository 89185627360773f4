"""docs/conformance.md names tests that exist, and every case of the sections it covers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "conformance.md").read_text()
FILES = dict(re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|$", TEXT, re.MULTILINE))
CASES = {
    "1": [1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 14],
    "2": [15, 16, 17, 18, 19, 20, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 34, 35],
    "3": [36, 37, 39, 40, 41, 42, 44, 45],
    "4": [46, 47, 48, 49, 51, 53, 54, 55, 56],
    "5": [57, 59, 60, 61],
    "6": [62, 63, 65, 66, 67, 68, 69],
    "7": [72],
    "8": [75, 76, 78, 79, 80, 81],
    "9": [83, 84, 85, 86],
    "10": [87, 88, 89, 90, 92, 93, 94, 95, 96, 98, 99],
    "11": [100, 101, 102, 103, 105, 106, 107],
    "12": [109, 110, 111, 112, 115, 116, 118, 119, 120],
    "13": [121, 122, 125, 127, 128, 129],
    "14": [130, 132, 133, 134],
    "15, 16": [136, 139, 140, 142, 143, 144, 145, 146, 147],
    "17": [148, 149, 151, 152, 153, 154, 156, 157],
    "18": [158, 159, 161, 162, 163],
    "19": [164, 169],
    "20": [170],
    "A": [1, 2, 4, 6, 7, 8, 9, 10, 11],
    "B": [12, 13, 15, 16, 17, 18, 19, 21, 22, 23, 24],
    "C": [25, 26, 27, 28, 29, 31, 32, 34, 35, 37, 38, 39, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50],
    "D": [51, 52, 53, 54, 55, 56, 57, 59, 60, 62, 63, 64, 65],
    "E": [66, 67, 68, 69, 70, 71, 72, 74, 76, 77, 78],
    "F": [79, 80, 81, 82, 83, 85, 86, 87, 88, 90],
    "G": [92, 93, 94],
    "H": [95, 97, 98, 99, 100, 102, 103, 104, 106, 107, 108, 109, 110],
    "I": [111, 112, 113, 114, 116, 117, 118],
    "J": [120, 121, 122, 124, 126, 127, 128, 129, 130, 132, 133, 134, 135, 136],
    "L": [140, 141],
}

REFERENCE = {
    "2": [15, 16, 17, 18, 19, 20, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 34, 35],
    "7": [71, 72, 73, 74],
    "9": [82, 83, 84, 85, 86],
    "10": [87, 88, 89, 90, 92, 93, 94, 95, 96, 98, 99],
    "11": [100, 101, 102, 103, 105, 106, 107],
    "12": [109, 110, 111, 112, 115, 116, 118, 119, 120],
    "13": [121, 122, 125, 127, 128, 129],
    "15, 16": [135, 136, 138, 139, 140, 142, 143, 144, 145, 146, 147],
    "18": [158, 159, 161, 162, 163],
    "19": [164, 165, 167, 168, 169],
}
"""All cases that the reference has in a section, so that none is left out without a word."""


def section_of(number: str) -> str:
    return re.split(rf"^## {number}\. .*$", TEXT, flags=re.MULTILINE)[1].split("\n## ")[0]


def numbers_in(found: list[str]) -> list[int]:
    return [int(number) for numbers in found for number in numbers.split(",")]


def rows_of(section: str) -> list[int]:
    rows: list[str] = re.findall(r"^\| ([\d, ]+) \| .+? \|", section_of(section), re.MULTILINE)
    return numbers_in(rows)


def test_conformance_page_names_tests_that_exist() -> None:
    named = re.findall(r"`(\w+)::(\w+)`", TEXT)
    assert named
    sources = {key: (ROOT / "tests" / path).read_text() for key, path in FILES.items()}
    assert [
        f"{FILES[key]}::{name}" for key, name in named if f"def {name}(" not in sources[key]
    ] == []
    assert set(FILES) == {key for key, _ in named}


def test_conformance_page_has_a_row_for_every_case() -> None:
    for section, cases in CASES.items():
        assert rows_of(section) == cases


def test_conformance_page_says_of_every_case_of_the_reference_that_has_no_row_why() -> None:
    for section, cases in REFERENCE.items():
        body = section_of(section)
        reasons = re.findall(r"^([\d, ]+): not here, because \w.+\.$", body, re.MULTILINE)
        assert sorted(rows_of(section) + numbers_in(reasons)) == cases, section
