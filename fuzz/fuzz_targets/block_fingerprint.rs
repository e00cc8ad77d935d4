//! Any bytes as a block of a table with slots and fingerprints, after its frame: an error or a value, never a panic.
#![no_main]

use azekura::inspect::{FuzzDecoder, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drop(decode(FuzzDecoder::FingerprintBlock, bytes)));
