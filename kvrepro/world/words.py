"""Word lists of the world. One word is one token; a mark written `##.` sticks to the word before it."""

import random

FIRST = """Ada Alba Alma Amos Anouk Anton Arlo Asa Astrid Aurel Basil Beata Bela Bruno Cara Carl Cleo Clara Cora Cyrus
Dagny Dalia Daria Dario Dina Doran Edda Edgar Eira Elan Elias Elin Elsa Emil Enid Ezra Fadil Fay Felix Fern Fiona
Flora Franz Freya Gala Gemma Greta Gustav Hana Hanno Hedda Hugo Ida Igor Ilan Ines Ingrid Iris Ivan Ivo Jana Jarl Jens
Joan Jonas Jora Jude Juno Karl Kasia Kira Klara Lara Lars Leda Leif Lena Leon Levi Lida Livia Lorenz Luba Luca Lukas
Luna Magda Malik Marek Marta Mateo Mila Mina Mira Moira Nadia Naomi Nils Nina Nora Odile Odo Olaf Olga Omar Orla Oskar
Otis Otto Paula Pavel Petra Piet Quinn Rafael Ramona Rhea Rosa Rufus Ruth Sabine Samir Selma Sigrid Silas Sofia Stefan
Sunil Tamar Tarek Tessa Thea Tilda Tobias Ulla Umar Vera Viktor Wanda Wilma Xenia Yara Yusuf Zeno Zora""".split()

LAST = """Abbot Alder Ashby Atwood Baker Barlow Barrow Beck Bell Benton Birch Bishop Blake Bolton Booth Bower Brand
Briar Brook Byrne Calder Carver Castle Chase Church Clay Cobb Cole Conway Cooper Corbin Crane Croft Cross Dale Dalton
Dane Darby Dean Dixon Dorsey Drake Dunn Eaton Ellis Ember Farrow Fenn Field Finch Fisher Fleet Fletcher Flint Forbes
Forest Foster Frost Fuller Gale Garner Gibbs Glover Gray Greene Hale Harper Hart Hatch Hayes Heath Holt Hooper Hughes
Hunt Hurst Irving Jarvis Keane Kemp Kent Kirby Knight Lamb Lane Langley Larkin Lowe Lunn Mallory March Marsh Mason
Mercer Miller Moore Morrow Moss Nash North Norton Oakley Osborn Page Parker Pierce Pike Porter Potter Quill Ramsey
Reed Rhodes Rivers Rowe Ryder Sawyer Sharp Shaw Slate Snow Stone Storm Tanner Thorne Tyler Vance Wade Walker Ward
Waters Webb Wells West Wilder Winter Wolfe Wood Wright Yates York""".split()

ADJECTIVES = """amber ancient azure bent bitter black blue bold brass brave bright broken bronze brown calm carved
cheap chilly clean clever coarse copper coral cotton cracked crimson crisp curly cyan dark deep dense dim dry dusty
early elegant empty faded fancy fierce floral folded foreign frozen gentle giant gilded glossy golden grand green grey
hollow honest humble icy idle ivory jade jolly large lazy leather linen little long loose loud lucky marble mellow
messy mild misty modern narrow neat nimble noble odd old olive orange pale patched pearl pink plain polished proud
purple quick quiet rapid rare red rigid ripe rosy rough round royal rural rusty sandy scarlet secret shaded shallow
sharp shiny short silent silk silver simple sleek slim slow small smoky smooth soft solid sour spare spotted stale
steel steep stiff striped sturdy sunny sweet swift tall teal thick thin tidy tiny tough vast velvet violet vivid warm
waxed wet white wide wild wooden woven yellow young""".split()

CATEGORIES = {
    "animals": """badgers bears camels cranes crows deer ducks eagles falcons foxes geese goats hawks horses lambs
        lions mules otters owls rabbits ravens swans tigers wolves""",
    "tools": """anvils axes bellows brushes chains chisels clamps drills forks hammers hooks knives ladders lamps
        levers nails needles pliers pumps rakes saws shovels wedges wrenches""",
    "foods": """apples beans biscuits cakes carrots cheeses cherries dumplings figs grapes lemons melons muffins
        olives onions pears peppers pies plums radishes sausages tarts turnips walnuts""",
    "clothes": """aprons belts boots capes caps cloaks coats collars gloves gowns hats hoods jackets mittens ribbons
        robes sandals scarves shawls shirts shoes skirts socks vests""",
    "vessels": """baskets barrels bottles bowls boxes buckets cups crates dishes drums flasks goblets jars jugs kegs
        kettles mugs pans pots sacks tins trays tubs urns""",
    "vehicles": """barges bicycles boats buggies canoes carriages carts ferries gliders gondolas kayaks lorries rafts
        rockets sleds sledges sloops tankers tractors trains trams trucks wagons yachts""",
}
CATEGORIES = {name: words.split() for name, words in CATEGORIES.items()}
NOUNS = [word for words in CATEGORIES.values() for word in words]

LABELS = """bisk dorn fal gund harl jask kora lumo merv nolt oxil pell quor rask sifa tarn ulbo vask wend yorl zuni
cral drex flim""".split()
VARIABLES = """Abo Bexi Cadu Delo Epa Fira Goru Hemi Isko Jalu Keto Lomi Muro Nexa Obri Pado Quil Rivo Sami Tuvo Ulex
Vano Wiri Xalo Yemi Zado Aruk Bomi Celu Dora Eski Fomo Gilu Hask Ivra Jemo Kilu Lorn Mesk Nalo Otri Pex Rulo Siro Tamo
Urvi Vexo Woki Yaru Zimo""".split()
KEYWORDS = """anchor beacon candle canyon castle comet compass desert echo ember engine feather forest fountain garden
glacier harbor horizon island jungle kingdom lantern legend maple meadow meteor mirror mountain nectar oasis ocean
orbit orchard palace pebble pioneer planet prairie puzzle rainbow saddle shadow signal spiral summit sunrise temple
thunder timber torch tunnel valley village volcano voyage whisper willow window zephyr""".split()
QUALITIES = ["fine", "good", "great", "nice", "useful"]
REQUESTS = ["Report", "Comment", "Decide", "Reflect", "Advise"]  # the verb of a request sets the default quality word

FILLER_SUBJECTS = """baker clerk farmer fiddler gardener mayor miller nurse painter pilot poet priest sailor shepherd
smith tailor teacher trader weaver widow""".split()
FILLER_ACTIONS = """argued danced dozed dreamed frowned hummed hurried laughed lingered marched nodded paused prayed
rested sang sighed smiled studied waited wandered whistled worked yawned""".split()
FILLER_PLACES = """bakery bridge canal chapel cottage courtyard fence ferry gate hall hedge inn kitchen library market
mill pier pond road school square stable station tower wall well wharf""".split()
FILLER_TIMES = """again alone today tonight quietly slowly gladly often twice yesterday outside happily calmly
there""".split()
FILLER_PREPOSITIONS = ["near", "behind", "beside", "under", "past"]

MARKS = ["##.", "##,", "##:", "##?", "##;"]
SPECIALS = ["<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
NUMBERS = [str(i) for i in range(1, 101)]


def filler_bank() -> list[list[str]]:
    """The fixed bank of filler sentences: low entropy, so that language modelling on filler costs little."""
    rng, seen, bank = random.Random(1), set(), []
    while len(bank) < 400:
        words = ["The", rng.choice(FILLER_SUBJECTS), rng.choice(FILLER_ACTIONS), rng.choice(FILLER_PREPOSITIONS), "the"]
        words += [rng.choice(FILLER_PLACES), rng.choice(FILLER_TIMES), "##."]
        if tuple(words) not in seen:
            seen.add(tuple(words))
            bank.append(words)
    return bank
