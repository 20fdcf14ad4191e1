import pytest

from brim.errors import BrimError, UsageError
from brim.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("3g", 3 << 30),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 << 29),
        (".5k", 512),
        ("900MiB", 900 << 20),
        ("17B", 17),
        (17, 17),
        ("0", 0),
        ("2TB", 2 * 10**12),
    ],
)
def test_parse(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("80%", 800), ("12.5 %", 125), ("0%", 0), ("100%", 1000), ("1GiB", 1 << 30), (17, 17)]
)
def test_parse_a_share_of_what_there_is(text, expected):
    assert parse_bytes(text, 1000) == expected


@pytest.mark.parametrize(
    ("text", "whole", "says"),
    [("101%", 1000, "more than the total"), ("80%", None, "total is unknown")],
)
def test_parse_refuses_a_share(text, whole, says):
    with pytest.raises(UsageError, match=says):
        parse_bytes(text, whole)


@pytest.mark.parametrize("text", ["%", "-5%", "5%%", "8GiB%", "nan%"])
def test_parse_refuses_what_looks_like_a_share(text):
    with pytest.raises(UsageError):
        parse_bytes(text, 1000)


@pytest.mark.parametrize("text", ["300", " 8 ", "1", "1048575"])
def test_parse_asks_what_a_small_number_without_a_unit_means(text: str) -> None:
    number = text.strip()
    with pytest.raises(UsageError, match=f"Write {number}MiB or {number}GiB; {number}B if"):
        parse_bytes(text)
    assert parse_bytes(f"{number}B") == int(number)


@pytest.mark.parametrize("text", ["0", 300, "1048576", "314572800"])
def test_parse_takes_numbers_of_bytes(text: str | int) -> None:
    assert parse_bytes(text) == int(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 GiBs", "1e9", "8,5GiB", "nan", "8 GiB 3", -5])
def test_parse_refuses(text):
    with pytest.raises(UsageError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (3 << 30, "3 GiB"),
        (2.61 * 2**30, "2.61 GiB"),
        (1 << 50, "1.02e+03 TiB"),
    ],
)
def test_format_bytes(count, expected):
    assert format_bytes(count) == expected


@pytest.mark.parametrize(("s", "expected"), [(1.5, "1.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs"), (3e-9, "3 ns")])
def test_format_seconds(s, expected):
    assert format_seconds(s) == expected


def test_an_error_says_what_was_asked_found_and_to_do():
    assert str(BrimError("asked", "found", "do")) == "asked\nfound\ndo"
    assert str(BrimError("asked", todo="do")) == "asked\ndo"
