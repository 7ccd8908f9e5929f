"""Batch jobs: JSONL in, JSONL out, and a kill at any moment loses and doubles nothing."""

from jaxinfer.batch.durable import BatchFileError as BatchFileError
from jaxinfer.batch.identity import JobSettings as JobSettings
from jaxinfer.batch.job import Progress as Progress
from jaxinfer.batch.job import run_job as run_job
from jaxinfer.batch.journal import journal_path as journal_path
from jaxinfer.batch.paths import ResumeError as ResumeError
from jaxinfer.batch.paths import check_paths as check_paths
from jaxinfer.batch.request import Defaults as Defaults
