"""Public conversation sets -> SFT data: python data_process/build_sft_dataset.py --help"""

from rstar2_megatron.data.sft_set import main

if __name__ == "__main__":
    raise SystemExit(main())
