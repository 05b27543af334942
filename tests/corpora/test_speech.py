"""Spoken digits: what there is, and that they are the same however often they are synthesised."""

import subprocess
import sys

import numpy as np
import pytest

from analysis_lib.corpora import speech


def test_spoken_digits():
    train, test = speech.spoken_digits("train"), speech.spoken_digits("test")
    assert (len(train), len(test)) == (1200, 480)
    for words in (train, test):
        assert np.bincount([label for _, _, label in words]).tolist() == [len(words) // 10] * 10
        for samples, rate, _ in words:
            assert rate == 16000
            assert samples.dtype == np.float32
            assert np.abs(samples).max() == pytest.approx(0.5, abs=1e-3)
            assert 0.2 < len(samples) / rate < 0.8
    assert not set(speech.VOICES["train"]) & set(speech.VOICES["test"])


def test_a_process_that_has_said_nothing_says_the_same(tmp_path):
    code = """if True:
        import sys
        from analysis_lib.corpora import speech
        speech.VOICES = {"train": speech.VOICES["train"][:1]}
        speech.synthesise(sys.argv[1])
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    with np.load(tmp_path / "train.npz") as found:
        sounds = np.split(found["samples"], found["lengths"].cumsum()[:-1])
    kept = speech.spoken_digits("train")[: len(sounds)]
    assert len(sounds) == 60
    for samples, (wanted, _, _) in zip(sounds, kept, strict=True):
        assert np.array_equal(samples / np.float32(32768), wanted)
