//! Keys: the big-endian index, plain or scrambled, then padding as `db_bench` pads (the digit zero).

use crate::workload::rng::{mix, unmix};
use serde::{Deserialize, Serialize};

/// Whether ascending indices give ascending keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KeyOrder {
    /// Ascending indices give ascending keys.
    Sequential,
    /// Ascending indices give keys all over the key space; no key twice.
    Scrambled,
}

/// Turns indices into keys and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keys {
    /// Bytes of each key, at least 8.
    pub(crate) size: usize,
    /// How indices are spread.
    pub(crate) order: KeyOrder,
}

impl Keys {
    /// Writes the key of `index` over `out`.
    pub(crate) fn write(&self, index: u64, out: &mut Vec<u8>) {
        let number = match self.order {
            KeyOrder::Sequential => index,
            KeyOrder::Scrambled => mix(index),
        };
        out.clear();
        out.extend_from_slice(&number.to_be_bytes());
        out.resize(self.size, b'0');
    }

    /// The index whose key this is; `None` if no index has it.
    pub(crate) fn index_of(&self, key: &[u8]) -> Option<u64> {
        let (head, padding) = key.split_first_chunk::<8>()?;
        if key.len() != self.size || padding.iter().any(|&byte| byte != b'0') {
            return None;
        }
        let number = u64::from_be_bytes(*head);
        Some(match self.order {
            KeyOrder::Sequential => number,
            KeyOrder::Scrambled => unmix(number),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{KeyOrder, Keys};

    fn key(keys: &Keys, index: u64) -> Vec<u8> {
        let mut out = Vec::new();
        keys.write(index, &mut out);
        out
    }

    #[test]
    fn keys_have_their_size_and_lead_back() {
        for order in [KeyOrder::Sequential, KeyOrder::Scrambled] {
            for size in [8, 16, 24] {
                let keys = Keys { size, order };
                for index in [0, 1, 2, 255, 256, 1 << 40, u64::MAX] {
                    let bytes = key(&keys, index);
                    assert_eq!(bytes.len(), size);
                    assert_eq!(keys.index_of(&bytes), Some(index));
                }
            }
        }
    }

    #[test]
    fn sequential_keys_ascend_and_scrambled_ones_do_not() {
        let plain = Keys { size: 16, order: KeyOrder::Sequential };
        let scrambled = Keys { size: 16, order: KeyOrder::Scrambled };
        assert!((0..10_000).all(|i| key(&plain, i) < key(&plain, i + 1)));
        let rises = (0..10_000).filter(|&i| key(&scrambled, i) < key(&scrambled, i + 1)).count();
        assert!((4_500..5_500).contains(&rises), "{rises}");
    }

    #[test]
    fn foreign_keys_are_known_as_such() {
        let keys = Keys { size: 16, order: KeyOrder::Scrambled };
        assert_eq!(keys.index_of(b"short"), None);
        assert_eq!(keys.index_of(&[b'1'; 16]), None);
        assert_eq!(keys.index_of(&[b'0'; 17]), None);
    }
}
