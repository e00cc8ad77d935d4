//! Records of the third founding document: decimal keys, values of letters. No byte is zero.

use crate::workload::data::shuffle;
use serde::{Deserialize, Serialize};

/// Values begin at this many different offsets of the same text.
const PERIOD: usize = 251;

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

    /// All keys in the order of the puts, in one buffer: decimal numbers of `key_len` digits.
    pub(crate) fn keys(&self) -> Vec<u8> {
        let mut ranks: Vec<u64> = (0..self.n).collect();
        match self.order {
            Order::Sequential => {}
            Order::Descending => ranks.reverse(),
            Order::Random => shuffle(&mut ranks, self.n),
        }
        ranks.into_iter().flat_map(|rank| format!("{rank:0len$}", len = self.key_len).into_bytes()).collect()
    }

    /// The text that [`Records::value`] takes values from.
    pub(crate) fn text(&self) -> Vec<u8> {
        (0..PERIOD + self.value_len).map(|at| (at % PERIOD) as u8 + 1).collect()
    }

    /// The value of the `i`-th key.
    pub(crate) fn value<'t>(&self, text: &'t [u8], i: usize) -> &'t [u8] {
        &text[i % PERIOD..][..self.value_len]
    }
}

#[cfg(test)]
mod tests {
    use super::{ORDERS, Order, Records};

    #[test]
    fn every_order_has_the_same_keys_once() {
        for (key_len, value_len) in [(20, 800), (10, 4), (24, 15)] {
            let records = |order| Records { n: 1000, key_len, value_len, order };
            let keys = |order| records(order).keys().chunks(key_len).map(<[u8]>::to_vec).collect::<Vec<_>>();
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
        let records = Records { n: 9, key_len: 20, value_len: 15, order: Order::Random };
        let text = records.text();
        let value = |i| records.value(&text, i);
        assert!((0..251).all(|i| value(i).len() == 15 && !value(i).contains(&0)));
        assert!(value(7) == value(258) && value(7) != value(8));
    }
}
