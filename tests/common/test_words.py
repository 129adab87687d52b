"""Numbers with their nouns."""

from nearkin._common.words import agreeing, counted


def test_nouns_agree_with_their_number():
    assert [counted(1, "image"), counted(1234, "class"), counted(0, "file")] == ["1 image", "1,234 classes", "0 files"]


def test_phrases_agree_with_their_number():
    phrase = "pairs of identical images are in different parts"
    assert agreeing(1, phrase) == "1 pair of identical images is in different parts"
    assert agreeing(2, "classes have a single image") == "2 classes have a single image"
