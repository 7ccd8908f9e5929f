"""`python -m jaxinfer`: the command `jaxinfer`."""

import sys

from jaxinfer.cli import main

sys.exit(main())
