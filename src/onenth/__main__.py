"""`python -m onenth`: the command line."""

import sys

from onenth.cli import main

sys.exit(main())
