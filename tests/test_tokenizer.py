import numpy as np
import pytest

from jaxllm.tokenizer import BYTES, END_OF_TEXT


@pytest.mark.parametrize("text", ["", "plain", "naïve 日本 🙂\n\x00"])
def test_round_trip(text):
    ids = BYTES.encode(text)
    assert ids.dtype == np.uint16
    assert ids.shape == (len(text.encode()),)
    assert np.array_equal(ids, BYTES.encode(text.encode()))
    assert BYTES.decode(ids) == text
    assert BYTES.decode(ids.tolist()) == text


def test_every_byte_is_its_own_id():
    assert BYTES.encode(bytes(range(256))).tolist() == list(range(256))


def test_end_of_text_and_broken_ids_decode():
    assert BYTES.end_of_text == BYTES.vocab_size - 1 == 256
    assert BYTES.decode([ord("a"), BYTES.end_of_text, ord("b")]) == f"a{END_OF_TEXT}b"
    # Half of a character, and an id beyond the vocabulary.
    assert BYTES.decode([0xC3, ord("x"), 300]) == "\ufffdx\ufffd"
