"""Write the no-GPU default's problems, model and SFT data: python data_process/make_tiny_dataset.py --out DIR"""

from rstar2_megatron.tiny.build import main

if __name__ == "__main__":
    main()
