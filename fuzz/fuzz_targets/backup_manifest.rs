//! Any bytes as the manifest of a backup.
//! The decoder returns an error or a value, and never panics.
#![no_main]

use azekura_backup::testing::{FuzzDecoder, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drop(decode(FuzzDecoder::Backup, bytes)));
