//! Text out of bytes that come in pieces.
//!
//! Owns characters that lie across the border of two pieces. Does not own the pieces.

/// Decodes UTF-8 piece by piece: a character that a border cuts is held until the rest of it comes; only what is no UTF-8 is replaced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Utf8 {
    /// The beginning of a character: at most three bytes.
    held: Vec<u8>,
}

impl Utf8 {
    /// Takes the next piece; gives what can be told by now.
    #[must_use]
    pub fn feed(&mut self, piece: &[u8]) -> String {
        let mut bytes = std::mem::take(&mut self.held);
        bytes.extend_from_slice(piece);
        let (mut text, mut rest) = (String::with_capacity(bytes.len()), bytes.as_slice());
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(len) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[len..];
                        }
                        None => {
                            self.held = after.to_vec();
                            return text;
                        }
                    }
                }
            }
        }
    }

    /// Gives what was held: nothing more comes, so it is no character.
    #[must_use]
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }

    /// Is nothing held?
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decoded(pieces: &[&[u8]]) -> String {
        let mut utf8 = Utf8::default();
        let text: String = pieces.iter().map(|piece| utf8.feed(piece)).collect();
        text + &utf8.finish()
    }

    #[test]
    fn characters_are_whole_wherever_they_are_cut() {
        let text = "a→é😀z";
        for size in 1..=text.len() {
            assert_eq!(decoded(&text.as_bytes().chunks(size).collect::<Vec<_>>()), text, "pieces of {size}");
        }
        assert_eq!(decoded(&[b"a\xe2\x86"]), "a\u{fffd}");
        assert_eq!(decoded(&[b"a\xe2", b"b"]), "a\u{fffd}b");
    }

    proptest! {
        #[test]
        fn pieces_give_what_the_whole_gives(bytes in proptest::collection::vec(any::<u8>(), 0..200), size in 1usize..9) {
            prop_assert_eq!(decoded(&bytes.chunks(size).collect::<Vec<_>>()), String::from_utf8_lossy(&bytes));
        }
    }
}
