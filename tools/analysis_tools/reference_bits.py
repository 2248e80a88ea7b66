from aft_mm.cli.main import script

if __name__ == '__main__':
    script('reference-bits')
