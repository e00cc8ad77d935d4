//! Any bytes as the payload of a commit in the log: an error or a value, never a panic.
#![no_main]

use azekura::inspect::{FuzzDecoder, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drop(decode(FuzzDecoder::Batch, bytes)));
