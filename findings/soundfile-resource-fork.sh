#!/bin/sh
# soundfile 0.14.0 (libsndfile 1.2.2): a file that is called "._" in the current folder keeps an MP3 in memory from
# being read, and writing a Sound Designer II to memory leaves such a file there.
#
# Seen: the same bytes are read in an empty folder, and refused ("bad data offset") once an SD2 was written to a BytesIO
# in it: libsndfile looks for the resource fork of a file without a name, and finds "._" in the current folder.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet soundfile==0.14.0 numpy==2.3.4
mkdir "$folder/empty"
cd "$folder/empty"
"$folder/venv/bin/python" - <<'PYTHON'
import io
import os

import numpy
import soundfile

tone = 0.5 * numpy.sin(numpy.arange(16000) / 20)


def written(form):
    file = io.BytesIO()
    soundfile.write(file, tone, 16000, format=form)
    return file.getvalue()


def read(content):
    try:
        return f"{len(soundfile.read(io.BytesIO(content))[0])} samples"
    except soundfile.SoundFileError as error:
        return f"{type(error).__name__}: {str(error).split(': ', 1)[1]}"


print("soundfile", soundfile.__version__, soundfile.__libsndfile_version__)
mp3 = written("MP3")
before = read(mp3)
print("the folder holds", os.listdir("."), "- an MP3 in memory:", before)
written("SD2")
left = os.listdir(".")
after = read(mp3)
print("the folder holds", left, "- the same MP3:", after)
os.remove("._")
again = read(mp3)
print("the folder holds", os.listdir("."), "- the same MP3:", again)
assert before == again == "16000 samples"
assert left == ["._"]
assert "bad data offset" in after
PYTHON
