"""Public mathematics sets -> train.jsonl: python data_process/process_train_dataset.py --help"""

from rstar2_megatron.data.train_set import main

if __name__ == "__main__":
    raise SystemExit(main())
