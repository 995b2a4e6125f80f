"""Entry point under RLinf's documented path; `bash run_rstar2.sh` calls it. Everything is in the package."""

import sys

from rstar2_megatron.runs.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
