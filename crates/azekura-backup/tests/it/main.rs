//! Backups to stores in memory, in directories, and to the one that `AZEKURA_BACKUP_URL` names.

mod backups;
mod bad_input;
mod faults;
mod fuzz_replay;
mod golden;
mod logs;
mod prunes;
mod regressions;
mod support;
