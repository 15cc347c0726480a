import pytest

from tfrl.cli import words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (7500, "2 h 05 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d 00 h"),
        (273_600.5, "3 d 04 h"),
    ],
)
def test_durations_have_their_two_largest_units(seconds, text):
    assert words.duration(seconds) == text


def test_sizes_have_three_digits():
    assert [words.size(n) for n in (999, 201_326_592, 2.5e9)] == ["999 bytes", "201 MB", "2.5 GB"]
