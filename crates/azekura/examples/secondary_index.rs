//! A secondary index: an index of users by city is added to existing data, kept up to date in the batch of each change,
//! and read together with the records in one snapshot.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use azekura::{Config, Database, Error, Partition, Result, Slice};

/// The records, and an index with the keys (city, 0, id) and empty values. City names contain no zero byte.
struct Users {
    db: Database,
    by_id: Partition,
    by_city: Partition,
}

fn index_key(city: &[u8], id: &[u8]) -> Vec<u8> {
    [city, &[0], id].concat()
}

impl Users {
    /// Opens both partitions, and builds the index if it is not complete. The last batch also writes a marker, so that
    /// an interrupted build is repeated.
    fn open(db: &Database) -> Result<Users> {
        let by_id = db.open_partition("users", Default::default())?;
        let by_city = db.open_partition("users by city", Default::default())?;
        let state = db.open_partition("state", Default::default())?;
        if !state.contains_key("users by city")? {
            let mut batch = db.batch();
            for pair in &by_id {
                let (id, city) = pair?;
                batch.insert(&by_city, index_key(&city, &id), "");
                if batch.len() == 1000 {
                    batch.commit()?;
                }
            }
            batch.insert(&state, "users by city", "complete");
            batch.commit()?;
        }
        Ok(Users { db: db.clone(), by_id, by_city })
    }

    /// Sets the city of a user. `&mut` excludes other writers: the call reads the old city and removes its index entry.
    fn put(&mut self, id: u64, city: &str) -> Result<()> {
        let id = id.to_be_bytes();
        let mut batch = self.db.batch();
        if let Some(old) = self.by_id.get(id)? {
            batch.remove(&self.by_city, index_key(&old, &id));
        }
        batch.insert(&self.by_id, id, city);
        batch.insert(&self.by_city, index_key(city.as_bytes(), &id), "");
        batch.commit()
    }

    /// Returns the records of all users in a city, from one point in time.
    fn in_city(&self, city: &str) -> Result<Vec<(u64, Slice)>> {
        let snapshot = self.db.snapshot();
        let mut found = Vec::new();
        for pair in snapshot.prefix(&self.by_city, index_key(city.as_bytes(), &[])) {
            let (key, _) = pair?;
            let id: [u8; 8] = key[city.len() + 1..].try_into().expect("an index key ends with 8 bytes of the id");
            let record = snapshot.get(&self.by_id, id)?.expect("a batch writes the record with its index entry");
            found.push((u64::from_be_bytes(id), record));
        }
        Ok(found)
    }
}

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-secondary-index-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    let existing = db.open_partition("users", Default::default())?; // data from a time without the index
    for (id, city) in [(1u64, "Nara"), (2, "Osaka"), (3, "Nara")] {
        existing.insert(id.to_be_bytes(), city)?;
    }

    let mut users = Users::open(&db)?;
    users.put(4, "Nara")?;
    users.put(1, "Osaka")?; // moves
    let ids = |city| users.in_city(city).map(|found| found.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    println!("Nara: {:?}, Osaka: {:?}", ids("Nara")?, ids("Osaka")?);
    assert_eq!((ids("Nara")?, ids("Osaka")?), (vec![3, 4], vec![1, 2]));

    drop((users, existing));
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}
