"""Ask a text: python examples/question.py data/sample.txt "Who was sick over the side with great dignity?" """

import sys

import streamh2o

for answer in streamh2o.answer(sys.argv[1], sys.argv[2:]):
    print(answer.question)
    print(f"  {answer.answer}  (confidence {answer.confidence:.2f})")
    for passage in answer.evidence:
        print(f"  line {passage.line}: {passage.quote}")
