"""Progress on a pipe: a line soon after the start, then by time, however slow the work is."""

import io
import time

from nearkin._common import progress
from nearkin._common.progress import ProgressBar, Reporter, escape_controls, format_duration, format_rate
from nearkin._common.words import agreeing


def test_lines_are_printed_while_no_unit_completes(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE", 0.02)
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.03)
    out = io.StringIO()
    deadline = time.monotonic() + 10
    with Reporter(out=out).track("embedding", 8, unit="img"):
        while out.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    printed = out.getvalue()
    assert printed.splitlines()[0] == "embedding    0%  8 img, after 0 s"
    assert printed.count("\n") >= 2
    time.sleep(0.1)
    assert out.getvalue() == printed  # and none after the end


def test_lines_have_speed_and_remaining_time():
    bar = ProgressBar("epoch 1/2", 8, "step", io.StringIO(), None)
    bar._start = time.monotonic() - 40
    bar.advance(2, note="loss 0.5")
    assert bar._line() == "epoch 1/2   25%  20.0 s/step  2 min left  loss 0.5"
    bar._start = time.monotonic() - 0.5
    assert "4.0 step/s  2 s left" in bar._line()


def test_quiet_prints_nothing():
    out = io.StringIO()
    with Reporter(quiet=True, out=out).track("embedding", 2) as bar:
        bar.advance(2)
    assert out.getvalue() == ""


def test_the_waits_are_short():
    assert progress.FIRST_LINE <= 2
    assert progress.LINE_INTERVAL <= 10


def test_findings_agree_with_their_number():
    from nearkin.data.check import CATALOGUE

    for kinds in CATALOGUE.values():
        for title, _ in kinds.values():
            one, many = agreeing(1, title).split(), agreeing(2, title).split()
            noun = next(i for i, word in enumerate(many) if word.endswith("s"))
            assert many[1:] == title.split()
            assert one[noun] in (many[noun].removesuffix("es"), many[noun].removesuffix("s")), title
            assert not {"are", "have", "differ"} & set(one), title


def test_rates_and_durations_are_written_for_people():
    assert (format_rate(412.25, "img"), format_rate(0.05, "step")) == ("412.2 img/s", "20.0 s/step")
    assert [format_duration(s) for s in (8.2, 95, 3700, 200000)] == ["8 s", "95 s", "62 min", "56 h"]


def test_control_characters_are_written_as_text():
    assert escape_controls("\x1b[2Jbird\x07.jpg") == r"\x1b[2Jbird\x07.jpg"
