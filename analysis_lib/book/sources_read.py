"""Reads the sources of what measures when it is imported, once for all kernels: each of them asks for their hash."""

from analysis_lib.measurement import shards
from analysis_lib.measurement.sources import source_hash

source_hash({shards.__name__})
