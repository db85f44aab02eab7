"""The base64 of route strings, with the standard library's strict one as the oracle."""

from __future__ import annotations

import base64
import binascii
import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gym_capture_redis import route_text
from gym_capture_redis.parts import PART_BYTES, cut

PIECE_BYTES = route_text._STANDARD.piece_bytes
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
LENGTHS = (
    *range(14),
    *(PIECE_BYTES + beside for beside in range(-5, 6)),
    *(2 * PIECE_BYTES + beside for beside in range(-4, 5)),
    10 * PIECE_BYTES + 1,
    *(3 * PART_BYTES + beside for beside in range(-2, 3)),
    7 * PART_BYTES + 1,
)
LONG = random.Random(1).randbytes(2 * PIECE_BYTES + 100)


@pytest.fixture(autouse=True, scope="module", params=["pybase64", "standard library"])
def _whose_base64(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test with both: what is stored must not depend on what is installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pybase64":
            pytest.importorskip("pybase64", reason="pybase64 is not installed")
            assert route_text._BASE64 != route_text._STANDARD
        else:
            patch.setattr(route_text, "_BASE64", route_text._STANDARD)
        yield


def decode_base64(text: str) -> bytes | None:
    parts = route_text.decode_base64(text)
    assert route_text.decode_base64("=:" + text, 2) == parts
    if parts is None:
        return None
    assert parts == cut(b"".join(parts))
    return b"".join(parts)


def encode_base64(raw: bytes) -> str:
    return route_text.encode_base64([raw])


def expected(text: str) -> bytes | None:
    """The standard library's strict decoding, where encoding its result gives the text back."""
    try:
        raw = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        return None
    return raw if base64.b64encode(raw).decode("ascii") == text else None


@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_of_any_length_are_encoded_as_the_standard_library_does_and_come_back(length: int) -> None:
    raw = random.Random(length).randbytes(length)
    text = encode_base64(raw)
    assert text == base64.b64encode(raw).decode("ascii")
    assert decode_base64(text) == raw


@given(raw=st.binary(max_size=200))
@example(raw=b"")
@example(raw=bytes(100))
@example(raw=b"\xff" * 100)
def test_any_bytes_come_back(raw: bytes) -> None:
    text = encode_base64(raw)
    assert text == base64.b64encode(raw).decode("ascii")
    assert decode_base64(text) == raw
    assert type(decode_base64(text)) is bytes


@given(
    pieces=st.lists(st.binary(max_size=8), max_size=8), head=st.text(st.sampled_from("nrle:8x"), max_size=9)
)
@example(pieces=[LONG, b"", LONG[:1], LONG], head="nrlre1:int8:1x1x1:")
def test_bytes_in_pieces_of_any_length_are_encoded_as_those_in_one(pieces: list[bytes], head: str) -> None:
    assert route_text.encode_base64(pieces, head) == head + encode_base64(b"".join(pieces))


def test_every_group_of_four_characters_is_worth_what_it_is_in_the_standard_library() -> None:
    """All pairs as the first and as the second half of a group, followed by a last group."""
    for pair in (one + other for one in ALPHABET for other in ALPHABET):
        text = f"{pair}QbQb{pair}AAAA"
        assert decode_base64(text) == base64.b64decode(text)


# What is not the base64 of anything

valid_texts = st.binary(max_size=30).map(lambda raw: base64.b64encode(raw).decode("ascii"))
base64_texts = st.text(st.sampled_from(ALPHABET + "="), max_size=24)
odd_characters = st.sampled_from("=-_ \n\r\t\0\x7f\x80\xff!,.:Aİ\u2028中😀\ud800") | st.characters()


@st.composite
def edited_texts(draw: st.DrawFn) -> str:
    """Base64 with one character put in, replaced or taken away."""
    text = draw(valid_texts)
    at = draw(st.integers(0, len(text)))
    new = draw(odd_characters | st.just(""))
    return text[:at] + new + text[at + draw(st.integers(0, 1)) :]


@given(text=st.one_of(st.text(max_size=16), base64_texts, valid_texts, edited_texts()))
@example(text="")
@example(text="AA==")
@example(text="AB==")
@example(text="AAA=")
@example(text="AAB=")
@example(text="====")
@example(text="A===")
@example(text="=AAA")
@example(text="AA=A")
@example(text="AA==AAAA")
@example(text="AAA=AAAA")
@example(text="AAAA====")
def test_any_text_is_decoded_exactly_when_it_is_canonical(text: str) -> None:
    assert decode_base64(text) == expected(text)


@pytest.mark.parametrize("trailing", range(64))
def test_bits_that_mean_nothing_must_be_zero(trailing: int) -> None:
    for text in (f"AAAAA{ALPHABET[trailing]}==", f"AAAAAA{ALPHABET[trailing]}="):
        assert decode_base64(text) == expected(text)
        assert (decode_base64(text) is None) == bool(trailing % (16 if text.endswith("==") else 4))


@pytest.mark.parametrize("size", [9, PIECE_BYTES - 3, PIECE_BYTES, PIECE_BYTES + 3, len(LONG)])
@pytest.mark.parametrize("character", [*"=-_ \n\0\x7f:é中😀", "\ud800"])
def test_one_character_of_no_base64_is_found_wherever_it_stands(size: int, character: str) -> None:
    text = encode_base64(LONG[:size])
    limit = PIECE_BYTES // 3 * 4
    places = {0, 1, 2, 3, 4, limit - 1, limit, limit + 1, len(text) // 2, len(text) - 5, len(text) - 1}
    for at in sorted(place for place in places if place < len(text)):
        damaged = text[:at] + character + text[at + 1 :]
        canonical_end = character == "=" and at == len(text) - 1 and expected(damaged) is not None
        assert (decode_base64(damaged) is None) != canonical_end
        assert decode_base64(damaged) == expected(damaged)


@pytest.mark.parametrize("size", [1, 2, 3, PIECE_BYTES, len(LONG)])
@pytest.mark.parametrize("whitespace", [" ", "\n", "\r\n", "\t"])
def test_white_space_around_or_between_is_not_canonical(size: int, whitespace: str) -> None:
    text = encode_base64(LONG[:size])
    for at in (0, 4, len(text) // 2, len(text)):
        assert decode_base64(text[:at] + whitespace + text[at:]) is None
        assert decode_base64(text[:at] + 4 * whitespace + text[at:]) is None


@pytest.mark.parametrize("size", [1, 2, 3, 4, PIECE_BYTES, PIECE_BYTES + 1, PIECE_BYTES + 2, len(LONG)])
def test_a_text_that_lost_its_end_is_not_decoded_unless_it_ends_with_a_group(size: int) -> None:
    text = encode_base64(LONG[:size])
    for lost in range(1, min(len(text), 9) + 1):
        assert decode_base64(text[:-lost]) == expected(text[:-lost])


@pytest.mark.parametrize("size", [2, PIECE_BYTES - 2, PIECE_BYTES + 1])
def test_padding_ends_the_text(size: int) -> None:
    text = encode_base64(LONG[:size])
    assert text.endswith("=")
    assert decode_base64(text + "AAAA") is None
    assert decode_base64(text + "====") is None
    assert decode_base64("AAAA" + text) == bytes(3) + LONG[:size]


@pytest.mark.parametrize("padded", ["AA==", "AAA=", "AAAA====", "AAAAAAA=", "AAAAAA=="])
@pytest.mark.parametrize("end", ["AAAA", "AAA=", "AA=="])
@pytest.mark.parametrize("pieces", [1, 2, 16])
def test_padding_at_the_end_of_a_piece_is_not_taken_for_that_of_the_text(
    padded: str, end: str, pieces: int
) -> None:
    text = "A" * (pieces * PIECE_BYTES // 3 * 4 - len(padded)) + padded + end
    assert len(text) % 4 == 0
    assert decode_base64(text) is expected(text) is None


def test_the_url_alphabet_is_another_text() -> None:
    raw = bytes(range(256)) * 3
    text = base64.urlsafe_b64encode(raw).decode("ascii")
    assert set(text) & set("-_")
    assert decode_base64(text) is None
    assert decode_base64(text.replace("-", "+").replace("_", "/")) == raw


def test_without_pybase64_the_standard_library_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pybase64", None)
    assert route_text._fastest() == route_text._STANDARD
