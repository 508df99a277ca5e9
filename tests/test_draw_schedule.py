"""The simulated schedules have the bubbles of the formulae."""

import itertools
from fractions import Fraction
from xml.etree import ElementTree

import pytest
from helpers.runner import REPOSITORY, load, outcome

TOOL = REPOSITORY / "tools" / "draw-schedule.py"


@pytest.fixture(scope="module")
def tool():
    return load(TOOL)


def exact_bubble(timeline) -> Fraction:
    end = max(passes[-1][4] for passes in timeline)
    busy = sum(end - begin for passes in timeline for *_, begin, end in passes)
    return 1 - Fraction(busy, end * len(timeline))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_bubbles_are_those_of_the_formulae(tool, ranks):
    for count in (ranks, 2 * ranks, 5 * ranks):
        for name in ("gpipe", "1f1b"):
            found = exact_bubble(tool.simulate(name, ranks, count))
            assert found == Fraction(ranks - 1, count + ranks - 1), (name, count)
        for stages in (2, 3):
            found = exact_bubble(tool.simulate("interleaved", ranks, count, stages))
            assert found == Fraction(ranks - 1, stages * count + ranks - 1), (stages, count)
        if count >= 2 * ranks:
            found = exact_bubble(tool.simulate("zbv", ranks, count))
            assert found == Fraction(ranks - 1, 6 * count + ranks - 1), count


def test_each_pass_happens_once_and_in_order(tool):
    """No rank does two things at a time; a stage waits for the one before it."""
    for name, (_, stages, formula) in tool.SCHEDULES.items():
        timeline = tool.simulate(name, 4, 8)
        assert tool.bubble(timeline) == pytest.approx(formula(4, 8, stages))
        ends = {passes[:3]: passes[4] for rank in timeline for passes in rank}
        assert len(ends) == sum(map(len, timeline)) == 8 * 4 * stages * (3 if name == "zbv" else 2)
        for rank in timeline:
            assert all(a[4] <= b[3] for a, b in itertools.pairwise(rank))
            for kind, stage, batch, begin, _ in rank:
                before = ("F", stage - 1, batch) if kind == "F" else (kind, stage + 1, batch)
                assert kind == "W" or ends.get(before, 0) <= begin
    assert tool.in_flight(tool.simulate("gpipe", 4, 8)) == [8, 8, 8, 8]
    assert tool.in_flight(tool.simulate("1f1b", 4, 8)) == [4, 3, 2, 1]


def test_picture(tmp_path, tool):
    file = tmp_path / "picture.svg"
    done = outcome(tmp_path, TOOL, "1f1b", "-p", 2, "-m", 3, "-o", file)
    assert done == (0, "bubble: 25.0%; in flight: [2, 1]\n")
    drawn = ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}use")
    assert len([*drawn]) == 2 * 2 * 3  # forward and backward pass of each micro-batch on each rank


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_the_pictures_of_chapter_7_are_those_of_the_tool(tool, schedule):
    picture = tool.svg(tool.simulate(schedule, 4, 8))
    assert (REPOSITORY / "docs" / f"schedule-{schedule}.svg").read_text() == picture
