"""Data sets are in a cache of their own."""

import os

import datasets

datasets.config.HF_DATASETS_CACHE = os.environ["CACHE"]
