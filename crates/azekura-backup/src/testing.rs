//! The decoders of stored bytes, each as one function, for fuzzing.

use crate::error::Result;
use crate::layout::{backup_object, decode_backup, decode_store};
use crate::log_object::{decode as decode_log, decode_header};

/// A decoder of the bytes of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FuzzDecoder {
    /// A log object.
    Log,
    /// The manifest of a backup, with the checksum that its name needs.
    Backup,
    /// The record of a store.
    Store,
}

/// Decodes bytes, and drops the value.
///
/// # Errors
/// `WrongContent`, `NotABackupStore` or `NewerVersion` if they are not what the decoder expects.
pub fn decode(decoder: FuzzDecoder, bytes: &[u8]) -> Result<()> {
    match decoder {
        FuzzDecoder::Log => {
            decode_header("log", bytes)?;
            decode_log("log", bytes).map(drop)
        }
        FuzzDecoder::Backup => {
            // The manifest has to repeat the id in its name.
            let text = String::from_utf8_lossy(bytes);
            let id = text.split("\"id\": \"").nth(1).and_then(|rest| rest.get(..22)).unwrap_or_default();
            decode_backup(&backup_object(id, bytes), bytes).map(drop)
        }
        FuzzDecoder::Store => decode_store("store", bytes).map(drop),
    }
}
