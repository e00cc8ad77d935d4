//! Accounts: several threads transfer money at the same time. A transaction reads two accounts and writes both. If
//! another thread has changed one of them meanwhile, it runs again. The sum of all accounts never changes.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use std::thread;

use azekura::{Config, Database, Error, ErrorKind, Partition, Result};

const ACCOUNTS: u64 = 8;
const THREADS: u64 = 4;
const TRANSFERS: u64 = 250;

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-transactions-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    let accounts = db.open_partition("accounts", Default::default())?;
    for account in 0..ACCOUNTS {
        accounts.insert(account.to_be_bytes(), 100u64.to_be_bytes())?;
    }

    thread::scope(|scope| {
        let work = |n| transfer_often(&db, &accounts, n);
        let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(move || work(n))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the thread does not panic"))
    })?;
    let mut sum = 0;
    for entry in accounts.iter() {
        sum += number(&entry?.1);
    }
    assert_eq!(sum, 100 * ACCOUNTS);
    println!("{} transfers, the sum is still {sum}", THREADS * TRANSFERS);

    // Without `transact`, the program decides what to do about a conflict.
    let mut tx = db.transaction();
    let balance = read(&tx, &accounts, 0)?;
    accounts.insert(0u64.to_be_bytes(), 7u64.to_be_bytes())?;
    tx.insert(&accounts, 0u64.to_be_bytes(), (balance + 1).to_be_bytes())?;
    let conflict = tx.commit().expect_err("the account has changed");
    assert_eq!(conflict.kind(), ErrorKind::Conflict);
    println!("{conflict}");

    drop(accounts);
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}

fn transfer_often(db: &Database, accounts: &Partition, thread: u64) -> Result<()> {
    (0..TRANSFERS).try_for_each(|n| {
        let (from, to) = ((n + thread) % ACCOUNTS, (3 * n + thread + 1) % ACCOUNTS);
        transfer(db, accounts, from, to, n % 20).map(drop)
    })
}

/// Returns whether there was enough money.
fn transfer(db: &Database, accounts: &Partition, from: u64, to: u64, amount: u64) -> Result<bool> {
    // May run several times, so it has no effects outside of the transaction.
    db.transact(|tx| {
        let balance = read(tx, accounts, from)?;
        if balance < amount {
            return Ok(false);
        }
        tx.insert(accounts, from.to_be_bytes(), (balance - amount).to_be_bytes())?;
        // Sees the write above, also if both accounts are the same.
        let balance = read(tx, accounts, to)?;
        tx.insert(accounts, to.to_be_bytes(), (balance + amount).to_be_bytes())?;
        Ok(true)
    })
}

fn read(tx: &azekura::Transaction, accounts: &Partition, account: u64) -> Result<u64> {
    Ok(tx.get(accounts, account.to_be_bytes())?.map_or(0, |value| number(&value)))
}

fn number(value: &[u8]) -> u64 {
    u64::from_be_bytes(value.try_into().expect("a balance has 8 bytes"))
}
