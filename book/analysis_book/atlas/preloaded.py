"""What each process that builds a row begins with: imported once, by the server that copies itself.

Importing this takes some seconds; nothing else imports it.
"""

import pandas as pd  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from analysis_book.atlas import probing  # noqa: F401

# A thousand patterns are compiled when the first model is saved.
get_checkpoint_conversion_mapping("bert")
