"""Spoken digits, made by formant synthesis: the voices of eSpeak NG in Praat."""

import importlib.metadata
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np

from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError

RATE = 16000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("English (Great Britain)", "English (America)", "English (Scotland)")
# Pitch as a factor of the voice's own, and words per minute.
MANNERS = ((0.85, 150), (1.15, 200))
# Without the robots and whispers among eSpeak's variants; a test voice is no variant of a training voice.
VOICES = {
    "train": (
        *("Male1", "Male3", "Male5", "Male6", "Male7", "Female1", "Female2", "Female4"),
        *("Annie", "Denis", "Gene", "Linda", "Mario", "Max", "Norbert", "Rob", "Steph", "Zac", "aunty", "boris"),
    ),
    "test": ("Male2", "Male4", "Female3", "Female5", "Andy", "John", "Lee", "Michael"),
}
# Counts changes of what is synthesised.
VERSION = 1


def digits_identity() -> str:
    """What the spoken digits depend on."""
    return f"spoken digits {VERSION}, praat-parselmouth=={importlib.metadata.version('praat-parselmouth')}"


def spoken_digits(split: str) -> list[tuple[np.ndarray, int, int]]:
    """The words *zero* to *nine* in synthetic voices of three accents, each low and slow, and high and fast.

    They are synthesised once, in about twenty seconds, and kept with what else is derived from packages.

    Args:
        split: ``train`` (20 voices, 1,200 words) or ``test`` (8 other voices, 480 words).

    Returns:
        Of each word its samples (float32 in [-1, 1], about half a second), their rate and its label, the digit.
    """
    folder = packages.derived(digits_identity(), "spoken-digits", _synthesise_apart)
    with np.load(folder / f"{split}.npz") as kept:
        ends = kept["lengths"].cumsum()[:-1]
        sounds = np.split(kept["samples"].astype(np.float32) / 32768, ends)
        return [(samples, RATE, int(label)) for samples, label in zip(sounds, kept["labels"], strict=True)]


def _synthesise_apart(folder: Path) -> None:
    # eSpeak's noise continues from word to word, so the same samples take a process that has said nothing yet.
    code = "import sys; from analysis_lib.corpora import speech; speech.synthesise(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise AnalysisError(f"the spoken digits could not be synthesised ({reason}): run `make setup`")


def synthesise(folder: str) -> None:
    """Write ``train.npz`` and ``test.npz`` to the folder: samples (int16) end to end, lengths and labels."""
    for split, voices in VOICES.items():
        spoken = [
            (_say(word, accent, voice, pitch, speed), label)
            for voice, accent, (pitch, speed) in itertools.product(voices, ACCENTS, MANNERS)
            for label, word in enumerate(WORDS)
        ]
        sounds, labels = zip(*spoken, strict=True)
        lengths = [len(sound) for sound in sounds]
        np.savez(Path(folder) / f"{split}.npz", samples=np.concatenate(sounds), lengths=lengths, labels=labels)


def _say(word: str, accent: str, voice: str, pitch: float, speed: int) -> np.ndarray:
    from parselmouth import praat

    voiced = praat.call("Create SpeechSynthesizer", accent, voice)
    # Rate, gap between words (s), pitch factor, pitch range factor, words per minute, phoneme alphabet.
    praat.call(voiced, "Speech output settings", RATE, 0.01, pitch, 1.0, speed, "IPA")
    samples = praat.call(voiced, "To Sound", word, "no")[0].values[0]
    # Some voices are louder than full scale.
    return np.rint(samples * (0.5 * 32767 / np.abs(samples).max())).astype(np.int16)
