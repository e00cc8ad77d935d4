//! Records of the third founding document: decimal keys, values of letters. No byte is zero.

use crate::workload::data::shuffle;
use serde::{Deserialize, Serialize};

/// Number of offsets in the same text at which values begin.
const PERIOD: usize = 251;
/// Most digits of a number.
const DIGITS: usize = 20;

/// The order in which records are put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    Sequential,
    Random,
    Descending,
}

pub(crate) const ORDERS: [Order; 3] = [Order::Sequential, Order::Random, Order::Descending];

impl Order {
    /// Suffix of fields; the document's own order has none.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Order::Sequential => "",
            Order::Random => "_random",
            Order::Descending => "_descending",
        }
    }
}

/// `n` records of one size, all different.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Records {
    pub(crate) n: u64,
    pub(crate) key_len: usize,
    pub(crate) value_len: usize,
    pub(crate) order: Order,
}

impl Records {
    pub(crate) fn bytes(&self) -> u64 {
        self.n * (self.key_len + self.value_len) as u64
    }

    /// All keys in the order of the puts.
    pub(crate) fn keys(&self) -> Keys {
        let mut ranks: Vec<u64> = (0..self.n).collect();
        match self.order {
            Order::Sequential => {}
            Order::Descending => ranks.reverse(),
            Order::Random => shuffle(&mut ranks, self.n),
        }
        let mut bytes = Vec::with_capacity(ranks.len() * self.key_len);
        for rank in ranks {
            write_key(rank, self.key_len, &mut bytes);
        }
        Keys { bytes, len: self.key_len }
    }

    pub(crate) fn values(&self) -> Values {
        let text = (0..PERIOD + self.value_len).map(|at| (at % PERIOD) as u8 + 1).collect();
        Values { text, len: self.value_len }
    }
}

fn write_key(mut number: u64, len: usize, out: &mut Vec<u8>) {
    let mut digits = [b'0'; DIGITS];
    for digit in digits.iter_mut().rev() {
        *digit += (number % 10) as u8;
        number /= 10;
    }
    out.extend_from_slice(&digits[DIGITS - len.min(DIGITS)..]);
    out.resize(out.len() + len.saturating_sub(DIGITS), b'0');
}

/// Keys in one buffer.
pub(crate) struct Keys {
    bytes: Vec<u8>,
    len: usize,
}

impl Keys {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks_exact(self.len)
    }
}

/// The values of keys.
pub(crate) struct Values {
    text: Vec<u8>,
    len: usize,
}

impl Values {
    /// The value of the `i`-th key.
    pub(crate) fn of(&self, i: usize) -> &[u8] {
        &self.text[i % PERIOD..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::{ORDERS, Order, Records};

    #[test]
    fn every_order_has_the_same_keys_once() {
        for (key_len, value_len) in [(20, 800), (10, 4), (24, 15)] {
            let records = |order| Records { n: 1000, key_len, value_len, order };
            let keys = |order| records(order).keys().iter().map(<[u8]>::to_vec).collect::<Vec<_>>();
            let sequential = keys(Order::Sequential);
            assert!(sequential.len() == 1000 && sequential.is_sorted_by(|a, b| a < b));
            for order in ORDERS {
                let mut all = keys(order);
                assert!(all.iter().all(|key| key.len() == key_len && !key.contains(&0)));
                let rises = all.windows(2).filter(|pair| pair[0] < pair[1]).count();
                match order {
                    Order::Sequential => assert_eq!(rises, 999),
                    Order::Random => assert!((400..600).contains(&rises), "{rises}"),
                    Order::Descending => assert_eq!(rises, 0),
                }
                all.sort();
                assert!(all == sequential, "{order:?}");
            }
            assert_eq!(records(Order::Random).bytes(), 1000 * (key_len + value_len) as u64);
        }
    }

    #[test]
    fn values_have_their_length_and_are_told_apart() {
        let values = Records { n: 9, key_len: 20, value_len: 15, order: Order::Random }.values();
        assert!((0..251).all(|i| values.of(i).len() == 15 && !values.of(i).contains(&0)));
        assert!(values.of(7) == values.of(258) && values.of(7) != values.of(8));
    }
}
