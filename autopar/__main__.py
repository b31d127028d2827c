"""`python -m autopar` is the command `autopar`."""

import sys

from autopar.cli import main

sys.exit(main())
