//! Values as bytes: a version byte, then postcard.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;

const VERSION: u8 = 1;

pub(crate) fn encode<T: Serialize>(value: &T) -> io::Result<Vec<u8>> {
    postcard::to_extend(value, vec![VERSION]).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// The length of what `encode` returns.
pub(crate) fn encoded_len<T: Serialize>(value: &T) -> io::Result<usize> {
    let len = postcard::experimental::serialized_size(value);
    len.map(|len| 1 + len).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// `what` is named in the error of bytes that cannot be decoded.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8], what: &str) -> io::Result<T> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{what}: {why}"));
    match bytes {
        [VERSION, rest @ ..] => match postcard::take_from_bytes(rest) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(invalid(format!("{} bytes too many", rest.len()))),
            Err(error) => Err(invalid(error.to_string())),
        },
        [version, ..] => Err(invalid(format!("version {version} is unknown"))),
        [] => Err(invalid("no bytes".into())),
    }
}

/// An error of azekura as one of a system call, with its message and source.
pub(crate) fn io_error(error: azekura::Error) -> io::Error {
    let kind = match error.kind() {
        azekura::ErrorKind::Corruption => io::ErrorKind::InvalidData,
        azekura::ErrorKind::Invalid => io::ErrorKind::InvalidInput,
        azekura::ErrorKind::OutOfSpace => io::ErrorKind::StorageFull,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use super::{decode, encode, encoded_len};

    #[test]
    fn bytes_of_other_versions_and_lengths_are_errors() {
        let bytes = encode(&(7u64, "seven")).unwrap();
        assert_eq!(decode::<(u64, String)>(&bytes, "pair").unwrap(), (7, "seven".to_owned()));
        assert_eq!(encoded_len(&(7u64, "seven")).unwrap(), bytes.len());
        for end in 0..bytes.len() {
            assert!(decode::<(u64, String)>(&bytes[..end], "pair").is_err(), "{end} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(decode::<(u64, String)>(&longer, "pair").unwrap_err().to_string(), "pair: 1 bytes too many");
        let newer = [&[2], &bytes[1..]].concat();
        assert_eq!(decode::<(u64, String)>(&newer, "pair").unwrap_err().to_string(), "pair: version 2 is unknown");
    }
}
