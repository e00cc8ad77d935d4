//! Encodes integers and byte strings: little-endian fixed width, LEB128 varints, length-prefixed strings.

use crate::base::error::{Error, Result};

/// Maximum length of the varint of a `u64`, in bytes.
pub(crate) const VARINT_LEN_MAX: usize = 10;

/// Appends `value` as a LEB128 varint, 1..=10 bytes.
#[inline]
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The length of `value` as a varint, in bytes.
#[inline]
pub(crate) fn varint_len(value: u64) -> usize {
    ((64 - (value | 1).leading_zeros()) as usize).div_ceil(7)
}

/// Appends a field of stored options: its number, and a varint as a byte string.
pub(crate) fn put_number_field(out: &mut Vec<u8>, field: u64, number: u64) {
    let mut value = Vec::new();
    put_varint(&mut value, number);
    put_varint(out, field);
    put_bytes(out, &value);
}

/// Appends a varint length and the bytes.
#[inline]
pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Decodes values from the front of a byte slice. Every method returns `Corruption` instead of reading past the end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteReader<'a> {
    rest: &'a [u8],
}

impl<'a> ByteReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> ByteReader<'a> {
        ByteReader { rest: bytes }
    }

    /// The bytes that have not been decoded yet.
    #[inline]
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `len` bytes.
    #[inline]
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        match self.rest.split_at_checked(len) {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(head)
            }
            None => Err(too_short()),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("take returned N bytes"))
    }

    #[inline]
    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    #[inline]
    pub(crate) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    #[inline]
    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    #[inline]
    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    #[inline]
    pub(crate) fn bytes16(&mut self) -> Result<[u8; 16]> {
        self.array()
    }

    /// Decodes a LEB128 varint. `Corruption` if it has more than 64 bits, or a redundant last byte of zero.
    #[inline]
    pub(crate) fn varint(&mut self) -> Result<u64> {
        if let [first @ 0..0x80, rest @ ..] = self.rest {
            self.rest = rest;
            return Ok(u64::from(*first));
        }
        self.long_varint()
    }

    fn long_varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for (i, byte) in self.rest.iter().take(VARINT_LEN_MAX).enumerate() {
            let bits = u64::from(byte & 0x7f);
            if i == VARINT_LEN_MAX - 1 && bits > 1 {
                return Err(Error::corruption("varint has more than 64 bits"));
            }
            value |= bits << (7 * i);
            if byte & 0x80 == 0 {
                if *byte == 0 && i > 0 {
                    return Err(Error::corruption("varint is longer than necessary"));
                }
                self.rest = &self.rest[i + 1..];
                return Ok(value);
            }
        }
        Err(too_short())
    }

    /// Decodes a varint that must fit 32 bits.
    #[inline]
    pub(crate) fn varint_u32(&mut self) -> Result<u32> {
        u32::try_from(self.varint()?).map_err(|_| Error::corruption("number is larger than 32 bits"))
    }

    /// Decodes a varint that is a length of following bytes. `Corruption` if it exceeds the length of
    /// [`ByteReader::rest`].
    #[inline]
    pub(crate) fn length(&mut self) -> Result<usize> {
        let len = self.varint()?;
        usize::try_from(len).ok().filter(|len| *len <= self.rest.len()).ok_or_else(too_short)
    }

    /// Decodes a varint length and that many bytes.
    #[inline]
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = self.length()?;
        self.take(len)
    }

    /// Returns `Corruption` unless all bytes have been decoded.
    pub(crate) fn finish(self) -> Result<()> {
        if self.rest.is_empty() { Ok(()) } else { Err(Error::corruption("there are bytes after the last field")) }
    }
}

#[cold]
fn too_short() -> Error {
    Error::corruption("bytes end within a value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints_round_trip_at_every_width() {
        for shift in 0..64 {
            for value in [(1u64 << shift) - 1, 1 << shift, u64::MAX >> (63 - shift)] {
                let mut out = Vec::new();
                put_varint(&mut out, value);
                assert_eq!(out.len(), varint_len(value));
                let mut d = ByteReader::new(&out);
                assert_eq!(d.varint().unwrap(), value);
                assert!(d.is_empty());
                for cut in 0..out.len() {
                    assert!(ByteReader::new(&out[..cut]).varint().is_err());
                }
            }
        }
    }

    #[test]
    fn overlong_and_oversized_varints_are_refused() {
        assert!(ByteReader::new(&[0x80, 0x00]).varint().is_err());
        assert!(ByteReader::new(&[0xff; 10]).varint().is_err());
        assert!(ByteReader::new(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02]).varint().is_err());
    }

    #[test]
    fn a_length_never_reaches_past_the_end() {
        let mut out = Vec::new();
        put_varint(&mut out, u64::MAX);
        assert!(ByteReader::new(&out).bytes().is_err());
        out.clear();
        put_bytes(&mut out, b"abc");
        let mut d = ByteReader::new(&out);
        assert_eq!(d.bytes().unwrap(), b"abc");
        d.finish().unwrap();
    }
}
