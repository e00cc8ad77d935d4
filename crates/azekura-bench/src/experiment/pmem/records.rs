//! Records of the third founding document: decimal keys, values of letters. No byte is zero.

use crate::workload::rng::Rng;
use serde::{Deserialize, Serialize};

/// Values begin at one of so many places of the same text.
const PERIOD: usize = 251;
/// So many digits a number has at most.
const DIGITS: usize = 20;

/// In which order records come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    Sequential,
    Random,
    Descending,
}

pub(super) const ORDERS: [Order; 3] = [Order::Sequential, Order::Random, Order::Descending];

impl Order {
    /// As names of fields end; the document's own order is not named.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Order::Sequential => "",
            Order::Random => "_random",
            Order::Descending => "_descending",
        }
    }
}

/// `n` records of one size, all different.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Records {
    pub(super) n: u64,
    pub(super) key_len: usize,
    pub(super) value_len: usize,
    pub(super) order: Order,
}

impl Records {
    pub(super) fn bytes(&self) -> u64 {
        self.n * (self.key_len + self.value_len) as u64
    }

    /// All keys in the order in which they come.
    pub(super) fn keys(&self) -> Keys {
        let mut ranks: Vec<u64> = (0..self.n).collect();
        match self.order {
            Order::Sequential => {}
            Order::Descending => ranks.reverse(),
            Order::Random => {
                let mut rng = Rng::new(self.n);
                for last in (1..ranks.len()).rev() {
                    ranks.swap(last, rng.below(last as u64 + 1) as usize);
                }
            }
        }
        let mut bytes = Vec::with_capacity(ranks.len() * self.key_len);
        for rank in ranks {
            write_key(rank, self.key_len, &mut bytes);
        }
        Keys { bytes, len: self.key_len }
    }

    pub(super) fn values(&self) -> Values {
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

/// One behind the other.
pub(super) struct Keys {
    bytes: Vec<u8>,
    len: usize,
}

impl Keys {
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks_exact(self.len)
    }
}

/// What belongs to keys.
pub(super) struct Values {
    text: Vec<u8>,
    len: usize,
}

impl Values {
    /// Of the `i`-th key that comes.
    pub(super) fn of(&self, i: usize) -> &[u8] {
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
