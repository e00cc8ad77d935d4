//! Generated versions of a file: deterministic edits, so that they can be checked without being kept.

/// The `version`-th version of `content`: some bytes replaced and some lines put in, at places that follow from the
/// path and the number alone. Version 0 is the content itself.
pub(crate) fn edited(mut content: Vec<u8>, path: &[u8], version: u64) -> Vec<u8> {
    if version == 0 {
        return content;
    }
    let mut random = SplitMix(super::ledger::fingerprint(path) ^ version);
    if !content.is_empty() {
        for _ in 0..8 + content.len() / 256 {
            let at = random.below(content.len());
            content[at] = b'a' + random.below(26) as u8;
        }
    }
    let at = random.below(content.len() + 1);
    // So long that tiny files, too, give memtables their weight in a reasonable number of puts.
    let lines = format!("\nversion {version}\n{}\n", sample_text(random.next(), 300));
    content.splice(at..at, lines.bytes());
    content
}

/// Text of about `bytes` bytes, for directories that have no files.
pub(crate) fn sample_text(seed: u64, bytes: usize) -> String {
    const WORDS: [&str; 24] = [
        "log", "beam", "corner", "house", "cedar", "floor", "treasure", "dry", "season", "humid", "air", "joint",
        "raised", "pillar", "roof", "silk", "lute", "mirror", "sutra", "seal", "key", "keeper", "autumn", "opening",
    ];
    let mut random = SplitMix(seed);
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        text.push_str(WORDS[random.below(WORDS.len())]);
        text.push(if random.below(12) == 0 { '\n' } else { ' ' });
    }
    text
}

/// The generator of Steele, Lea and Flood: one addition and three mixing steps a number.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_repeatable_and_differ() {
        let content = b"one two three\n".repeat(100);
        assert_eq!(edited(content.clone(), b"p", 0), content);
        let first = edited(content.clone(), b"p", 1);
        assert_eq!(first, edited(content.clone(), b"p", 1));
        assert_ne!(first, edited(content.clone(), b"p", 2));
        assert_ne!(first, edited(content, b"q", 1));
        assert!(!edited(Vec::new(), b"p", 1).is_empty());
    }
}
