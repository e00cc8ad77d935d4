//! Nanoseconds per operation, printed: `cargo test --release -p azekura --lib memtable::speed -- --ignored
//! --nocapture`.

use std::hint::black_box;
use std::sync::Arc;

use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, SeqNo};
use crate::iter::InternalIter;
use crate::mem::epoch::EpochCell;
use crate::memtable::Memtable;
use crate::vfs::Env;
use crate::vfs::env::SystemEnv;

const COUNT: u64 = 500_000;

pub(crate) fn mixed(n: u64) -> u64 {
    let n = (n ^ n >> 31).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (n ^ n >> 29).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

pub(crate) fn random_key(n: u64) -> [u8; 16] {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&mixed(n).to_be_bytes());
    key[8..].copy_from_slice(&mixed(!n).to_be_bytes());
    key
}

fn decimal_key(n: u64) -> [u8; 16] {
    format!("{:016}", mixed(n) % (1 << 32)).into_bytes().try_into().expect("16 digits")
}

fn ascending_key(n: u64) -> [u8; 16] {
    format!("{n:016}").into_bytes().try_into().expect("16 digits")
}

/// Nanoseconds for each of `count`, printed too.
pub(crate) fn time(what: &str, count: u64, body: impl FnOnce()) -> f64 {
    let env = SystemEnv::new();
    let start = env.monotonic_ns();
    body();
    let each = (env.monotonic_ns() - start) as f64 / count as f64;
    println!("  {what:<28}{each:>8.1} ns");
    each
}

fn measure(name: &str, key_of: fn(u64) -> [u8; 16]) {
    let keys: Vec<[u8; 16]> = (0..COUNT).map(key_of).collect();
    let absent: Vec<[u8; 16]> = (COUNT..2 * COUNT).map(key_of).collect();
    let shuffled: Vec<[u8; 16]> = (0..COUNT).map(|n| keys[(mixed(n + 7) % COUNT) as usize]).collect();
    let value = [7; 100];
    let table = Arc::new(Memtable::new(KeyOrder::bytewise(), 1));
    println!("{name}");
    time("insert", COUNT, || {
        for (n, user) in keys.iter().enumerate() {
            let entry = EntryRef { user_key: user, seqno: SeqNo(n as u64 + 1), kind: RecordKind::Put, value: &value };
            table.insert(entry).unwrap();
        }
    });
    time("get hit", COUNT, || {
        for key in &shuffled {
            let entry = table.get(key, table.hash_of(key), SeqNo::MAX).unwrap();
            black_box(entry.value[0]);
        }
    });
    time("get miss", COUNT, || {
        for key in &absent {
            black_box(table.get(key, table.hash_of(key), SeqNo::MAX).is_none());
        }
    });
    time("get hit, ordered index", COUNT, || {
        for key in &shuffled {
            black_box(table.get(key, None, SeqNo::MAX).unwrap().seqno);
        }
    });
    let mut cursor = table.iter();
    time("scan forward, per entry", table.len(), || {
        let mut met = 0;
        cursor.seek_to_first().unwrap();
        while cursor.valid() {
            met += u64::from(black_box(cursor.entry()).value[0] == 7);
            cursor.next().unwrap();
        }
        assert_eq!(met, table.len());
    });
    time("scan backward, per entry", table.len(), || {
        cursor.seek_to_last().unwrap();
        while cursor.valid() {
            black_box(cursor.entry().value[0]);
            cursor.prev().unwrap();
        }
    });
    time("seek", COUNT / 5, || {
        for key in shuffled.iter().take(COUNT as usize / 5) {
            cursor.seek(InternalKey::before_versions_of(key)).unwrap();
            black_box(cursor.entry().seqno);
        }
    });
    println!(
        "  {:.1} bytes per entry of 116; height {}, leaves {:.0} % full",
        table.bytes() as f64 / table.len() as f64,
        table.tree().height(),
        100.0 * table.tree().fill()
    );
    time("drop (per table)", 1, || drop((cursor, table)));
}

#[test]
#[ignore = "measures speed; run it alone, in release"]
fn speed() {
    for _ in 0..2 {
        measure("random 16 bytes", random_key);
    }
    measure("random decimal digits", decimal_key);
    measure("ascending decimal digits", ascending_key);
    println!("beside");
    time("Memtable::new and drop", 10_000, || {
        for _ in 0..10_000 {
            black_box(Memtable::new(KeyOrder::bytewise(), 1));
        }
    });
    let cell = EpochCell::new(Arc::new(5u64));
    time("epoch load", 10_000_000, || {
        (0..10_000_000).for_each(|_| {
            black_box(*cell.load());
        })
    });
    let outer = cell.load();
    time("epoch load, nested", 10_000_000, || {
        (0..10_000_000).for_each(|_| {
            black_box(*cell.load());
        })
    });
    drop(outer);
}
