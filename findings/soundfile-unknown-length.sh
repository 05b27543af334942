#!/bin/sh
# soundfile 0.14.0 (libsndfile 1.2.2): a FLAC or a CAF whose header says that its length is not known, as encoders that
# write to a pipe leave it, cannot be read.
#
# Valid by their specifications: in a FLAC, 0 samples in all means that the number is not known (RFC 9639, section 8.2);
# in a CAF, a data chunk of size -1 goes to the end of the file. Of the FLAC, soundfile takes 0 for the largest number
# that there is; the CAF is "malformed". An AU of unknown length is read.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet soundfile==0.14.0 numpy==2.3.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import io

import numpy
import soundfile

tone = 0.5 * numpy.sin(numpy.arange(16000) / 20)


def written(form):
    file = io.BytesIO()
    soundfile.write(file, tone, 16000, format=form, subtype="PCM_16")
    return bytearray(file.getvalue())


def read(content):
    try:
        return f"{len(soundfile.read(io.BytesIO(bytes(content)))[0])} samples"
    except (ValueError, MemoryError, soundfile.SoundFileError) as error:
        return f"{type(error).__name__}: {error}"


print("soundfile", soundfile.__version__, soundfile.__libsndfile_version__)
flac = written("FLAC")
print("FLAC:", read(flac))
flac[21] &= 0xF0
flac[22:26] = bytes(4)
of_flac = read(flac)
print("FLAC of unknown length:", of_flac)
caf = written("CAF")
print("CAF:", read(caf))
place = caf.index(b"data") + 4
caf[place : place + 8] = b"\xff" * 8
of_caf = read(caf)
print("CAF of unknown length:", of_caf)
au = written("AU")
au[8:12] = b"\xff" * 4
of_au = read(au)
print("AU of unknown length:", of_au)
assert of_flac.startswith("ValueError: array is too big")
assert "malformed" in of_caf
assert of_au == "16000 samples"
PYTHON
