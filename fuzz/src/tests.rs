use super::TARGETS;

/// Random changes of each seed.
const CHANGES: usize = 60;

/// A generator of numbers: splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// Replaces, removes or doubles some bytes.
fn changed(seed: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..1 + numbers.below(4) {
        let at = numbers.below(bytes.len().max(1)).min(bytes.len());
        let end = (at + 1 + numbers.below(8)).min(bytes.len());
        match numbers.below(3) {
            0 => bytes[at..end].iter_mut().for_each(|byte| *byte = numbers.below(256) as u8),
            1 => drop(bytes.drain(at..end)),
            _ => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
        }
    }
    bytes
}

#[test]
fn seeds_are_taken_and_no_change_of_them_panics() {
    for target in TARGETS {
        let mut numbers = Numbers(1);
        for (index, seed) in (target.seeds)().iter().enumerate() {
            assert!((target.read)(seed), "seed {index} of {} is refused", target.name);
            for _ in 0..CHANGES {
                (target.read)(&changed(seed, &mut numbers));
            }
        }
    }
}

/// Inputs at which a reader has panicked: a merge whose result is longer than every token.
const ONCE_PANICKED: [(&str, &str); 1] = [(
    "tokenizer",
    r#"{"version":"1.0","model":{"type":"BPE","vocab":{"T":0,"h":1,"e":2,"Th":3},"merges":["T h","Th e"]}}"#,
)];

#[test]
fn what_once_panicked_is_refused() {
    for (name, input) in ONCE_PANICKED {
        let target = TARGETS.iter().find(|target| target.name == name).expect("it is there");
        assert!(!(target.read)(input.as_bytes()), "{name}: {input}");
    }
}
