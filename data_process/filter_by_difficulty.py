"""Problems -> those that a model does not always solve, with its pass counts.

    python data_process/filter_by_difficulty.py --model DIR --data FILE [FILE ...] --out DIR --config NAME [key=value ...]

8 attempts at each problem through the agent loop of training; problems that were always solved are dropped. After a stop
the same command continues. The conversation format, the sampling and the engine come from the
configuration (config/NAME.yaml or a path) and the overrides, as in training.
"""

from rstar2_megatron.runs.filter_command import main

if __name__ == "__main__":
    raise SystemExit(main())
